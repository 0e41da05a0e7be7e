"""One step of one rank of a large job, in one process: the bytes that its collectives carry.

The ``torch`` engine runs as it is, with real rows and ids, over process groups of thousands of
ranks that exist in name only. Every other rank is taken to ask what this one asks and to answer
with nothing, so sizes are those of a real step and values mean nothing. What the planner says of a
plan is held against this.

Left out: time, and the ``torchrec`` engine.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gem_embeddings.contract import (
    LookupSpec,
    OptimizerSpec,
    RowDtype,
    TableLoad,
    TablePlan,
    TableSpec,
)
from gem_embeddings.inputs import features_of_tables
from gem_embeddings.planning.traffic import popularity_bins
from gem_embeddings.sharded.engine import TorchTables
from gem_jagged.batch import Jagged
from gem_opkit.errors import ConfigError, UnsupportedError, refusal
from gem_parallel.launch import World

_OP = "dry_run"
# Untyped: torch calls these methods by position, under names of its own.
_ProcessGroup: Any = dist.ProcessGroup
# By name: the stubs of torch leave out what its own process groups in Python end their work with.
_c10d: Any = import_module("torch._C._distributed_c10d")
_BACKEND = "gem_dry_run"
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


class _NamedGroup(_ProcessGroup):
    """A process group without other processes: each of its ranks sends what this one sends."""

    sent: list[tuple[str, int]]

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._name = rank, size, ""
        self.sent = []

    # Torch names a group through its backend, of which this one has none.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        pass

    @property
    def group_name(self) -> str:
        """Name by which torch finds the group."""
        return self._name

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return _BACKEND

    def _done(self, name: str, sent: Tensor) -> Any:
        self.sent.append((name, sent.numel() * sent.element_size()))
        ended: Future[None] = Future()
        ended.set_result(None)
        return _c10d._create_work_from_future(ended)

    def alltoall_base(
        self,
        output: Tensor,
        given: Tensor,
        output_splits: list[int],
        splits: list[int],
        opts: Any,
    ) -> Any:
        """From every rank comes what this one sends to itself; vectors are zeros."""
        if given.dtype == torch.int64:
            begin = sum(splits[: self._rank])
            own = given[begin : begin + splits[self._rank]]
            output.copy_(own.repeat(self._size))
        else:
            output.zero_()
        return self._done("all_to_all", given)

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any) -> Any:
        output.view(self._size, -1).copy_(given.view(1, -1))
        return self._done("all_gather", given)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any) -> Any:
        output.copy_(given.view(self._size, -1)[self._rank])
        return self._done("reduce_scatter", given)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Leave the values: the mean of equal ones."""
        return self._done("all_reduce", tensors[0])

    # The names of torch 2.13 for the two above.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base


def _group_of(store: Any, rank: int, size: int, timeout: Any) -> _NamedGroup:
    return _NamedGroup(rank, size)


@contextmanager
def _named_ranks(rank: int, size: int) -> Iterator[World]:
    if dist.is_initialized():
        raise ConfigError(
            refusal(
                _OP,
                "process group",
                must="not exist, because ranks are only named here",
                got="one",
                fix="call it in a process of its own",
            )
        )
    if not hasattr(dist.Backend, _BACKEND.upper()):
        dist.Backend.register_backend(_BACKEND, _group_of, devices=["cpu"])
    dist.init_process_group(_BACKEND, rank=rank, world_size=size, store=dist.HashStore())
    try:
        yield World(rank=rank, size=size)
    finally:
        dist.destroy_process_group()


def dry_run(
    specs: Sequence[TableSpec],
    lookups: Sequence[LookupSpec],
    plan: TablePlan,
    optimizer: OptimizerSpec,
    loads: Mapping[str, TableLoad],
    *,
    batch_per_rank: int,
    wire_dtype: RowDtype = "fp32",
    rank: int = 0,
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
    with _named_ranks(rank, plan.ranks) as world:
        tables = TorchTables(
            specs, lookups, plan, optimizer, world, device=world.device, wire_dtype=wire_dtype
        )
        mesh: Any = tables.mesh
        groups = {
            axis: mesh.get_group(axis)
            for axis, size in (
                ("table_shard", plan.table_shard),
                ("table_replicate", plan.table_replicate),
            )
            if size > 1
        }
        outputs = tables(ids)
        forward = _taken(groups)
        torch.cat([out.reshape(-1) for out in outputs.values()]).sum().backward()
        if not plan.fully_sharded:
            tables.sync()
        backward = _taken(groups)
        held = tables.resident_bytes()
        asked = {name: counts.unique for name, counts in tables.counters().items()}
    return DryRun(forward, backward, asked, held)


def _taken(groups: Mapping[str, Any]) -> dict[tuple[str, str], list[int]]:
    taken: dict[tuple[str, str], list[int]] = {}
    for axis, group in groups.items():
        for name, sent in group.sent:
            taken.setdefault((axis, name), []).append(sent)
        group.sent = []
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
    rows = spec.num_embeddings
    bins = popularity_bins(rows)
    counts_X = torch.tensor([count for count, _ in bins], dtype=torch.float64)
    middles_X = torch.tensor([middle for _, middle in bins], dtype=torch.float64)
    masses_X = counts_X * middles_X**-load.zipf_exponent
    bin_I = torch.multinomial(masses_X, max(1, sum(lengths)), replacement=True, generator=draw)
    bin_I = bin_I[: sum(lengths)]
    first_X = counts_X.cumsum(0) - counts_X
    within_I = torch.rand(len(bin_I), generator=draw, dtype=torch.float64) * counts_X[bin_I]
    popularity_I = (first_X[bin_I] + within_I.floor()).to(torch.int64).clamp_(max=rows - 1)
    # From another row on in each table: else the most popular rows of all lie on one rank.
    rows_I = (popularity_I * _SCATTER + crc32(spec.name.encode())) % rows
    return Jagged.from_lengths(rows_I, torch.tensor(lengths))
