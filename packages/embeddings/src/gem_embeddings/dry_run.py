"""One step of one rank of a large job, in one process: the bytes that its collectives carry.

The ``torch`` engine runs as it is, with real rows and ids, over process groups of thousands of
ranks that exist in name only. Every other rank is taken to ask what this one asks and to answer
with nothing, so sizes are those of a real step and values mean nothing. What the planner says of a
plan is held against this.

Left out: time, and the ``torchrec`` engine.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from gem_embeddings.contract import (
    LookupSpec,
    OptimizerSpec,
    RowDtype,
    TableLoad,
    TablePlan,
    TableSpec,
)
from gem_embeddings.engine import Exchanged
from gem_embeddings.inputs import features_of_tables
from gem_embeddings.planning.traffic import popularity_bins
from gem_embeddings.sharded.engine import TorchTables
from gem_jagged.batch import Jagged
from gem_opkit.errors import ConfigError, UnsupportedError, refusal
from gem_parallel.dry_run.groups import named_ranks
from gem_parallel.dry_run.ledger import Ledger

_OP = "dry_run"
# An odd prime: rows that are popular together do not lie together.
_SCATTER = 2_654_435_761


@dataclass(frozen=True, slots=True)
class DryRun:
    """What one rank gave to its collectives in a step.

    Attributes:
        forward_bytes: (axis, collective) -> bytes given in the forward pass, one number a call.
        backward_bytes: the same of the backward pass.
        asked_rows: table name -> different rows that the rank asked for.
        held_bytes: weights and optimizer rows of the rank between steps, with padding.
    """

    forward_bytes: Mapping[tuple[str, str], Sequence[int]]
    backward_bytes: Mapping[tuple[str, str], Sequence[int]]
    asked_rows: Mapping[str, int]
    held_bytes: int


def dry_run(  # noqa: PLR0913 - the last four are settings of their own
    specs: Sequence[TableSpec],
    lookups: Sequence[LookupSpec],
    plan: TablePlan,
    optimizer: OptimizerSpec,
    loads: Mapping[str, TableLoad],
    *,
    batch_per_rank: int,
    wire_dtype: RowDtype = "fp32",
    rank: int = 0,
    replicas: Exchanged = "weights",
) -> DryRun:
    """Run one step of one rank and count what it gives to its collectives.

    Args:
        specs: the tables; the rank's rows are made, on the CPU.
        lookups: features beyond those that the tables name.
        plan: where the tables lie, for 2 ranks or more.
        optimizer: how rows learn.
        loads: feature -> statistics from which its ids are drawn, with the seed 0; features left
            out have one id an example.
        batch_per_rank: examples of a rank.
        wire_dtype: format in which vectors travel.
        rank: world rank that is run.
        replicas: what sharding groups exchange.

    Returns:
        bytes of each collective, in the order of its calls.

    Raises:
        ConfigError: a process group exists already, or the plan has one rank.
        UnsupportedError: a load with ``unique_fraction``, which ids cannot be drawn from.
    """
    if plan.ranks < 2:
        raise ConfigError(
            refusal(_OP, "plan", must="have 2 ranks or more", got=plan.ranks, fix="run it instead")
        )
    draw = torch.Generator().manual_seed(0)
    ids: dict[str, Jagged] = {}
    for spec in specs:
        for name in features_of_tables(_OP, specs, lookups)[spec.name]:
            load = loads.get(name) or TableLoad(feature_name=name)
            ids[name] = _draw(load, spec, batch_per_rank, draw)
    with named_ranks(rank, plan.ranks, op=_OP) as named:
        world = named.world
        tables = TorchTables(
            specs,
            lookups,
            plan,
            optimizer,
            world,
            device=world.device,
            wire_dtype=wire_dtype,
            replicas=replicas,
        )
        named.ledger.take()
        outputs = tables(ids)
        forward = _taken(named.ledger)
        torch.cat([out.reshape(-1) for out in outputs.values()]).sum().backward()
        if not plan.fully_sharded:
            tables.sync()
        backward = _taken(named.ledger)
        held = tables.resident_bytes()
        asked = {name: counts.unique for name, counts in tables.counters().items()}
    return DryRun(forward, backward, asked, held)


def _taken(ledger: Ledger) -> dict[tuple[str, str], list[int]]:
    taken: dict[tuple[str, str], list[int]] = {}
    for call in ledger.take():
        taken.setdefault((call.axis, call.collective), []).append(call.bytes)
    return taken


def _draw(load: TableLoad, spec: TableSpec, examples: int, draw: torch.Generator) -> Jagged:
    """Draw the ids of one feature: popularity by the load, rows scattered over the table."""
    if load.unique_fraction is not None:
        raise UnsupportedError(
            refusal(
                _OP,
                f"loads[{load.feature_name!r}]",
                must="have a zipf_exponent alone, because ids are drawn",
                got=f"unique_fraction={load.unique_fraction}",
                fix="leave unique_fraction out",
            )
        )
    few = math.floor(load.ids_per_example)
    more_B = torch.rand(examples, generator=draw) < load.ids_per_example - few
    lengths = [few + int(more) for more in more_B]
    rows_I = draw_rows(
        spec.num_embeddings,
        sum(lengths),
        draw,
        zipf_exponent=load.zipf_exponent,
        table_name=spec.name,
    )
    return Jagged.from_lengths(rows_I, torch.tensor(lengths))


def draw_rows(
    rows: int, count: int, draw: torch.Generator, *, zipf_exponent: float, table_name: str
) -> Tensor:
    """Draw rows of a table by popularity, scattered over it.

    Args:
        rows: of the table.
        count: how many to draw.
        draw: where the numbers come from, on the CPU.
        zipf_exponent: the row of rank r is asked for as often as r to the power of minus this.
        table_name: decides from which row on popularity falls, so that the most popular rows of
            all tables do not lie on one rank.

    Returns:
        int64, (count,), 0 <= row < rows.
    """
    bins = popularity_bins(rows)
    counts_X = torch.tensor([count for count, _ in bins], dtype=torch.float64)
    middles_X = torch.tensor([middle for _, middle in bins], dtype=torch.float64)
    masses_X = counts_X * middles_X**-zipf_exponent
    bin_I = torch.multinomial(masses_X, max(1, count), replacement=True, generator=draw)
    bin_I = bin_I[:count]
    first_X = counts_X.cumsum(0) - counts_X
    within_I = torch.rand(len(bin_I), generator=draw, dtype=torch.float64) * counts_X[bin_I]
    popularity_I = (first_X[bin_I] + within_I.floor()).to(torch.int64).clamp_(max=rows - 1)
    # From another row on in each table: else the most popular rows of all lie on one rank.
    return (popularity_I * _SCATTER + crc32(table_name.encode())) % rows
