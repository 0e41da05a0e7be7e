"""The torch engine against unsharded tables whose gradients are averaged by hand."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from gem_embeddings.contract import LookupSpec, OptimizerSpec, Sharding, TablePlan, TableSpec
from gem_embeddings.engine import build_tables
from gem_embeddings.optimizer import table_optimizer
from gem_embeddings.planning.layout import place_tables
from gem_embeddings.tables import EmbeddingTables
from gem_jagged.batch import Jagged
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks

SPECS = (
    TableSpec(name="a", embedding_dim=4, num_embeddings=11, feature_names=("a1",)),
    # One row: on several ranks all but one own nothing of it.
    TableSpec(name="b", embedding_dim=8, num_embeddings=1, feature_names=("b1",)),
    TableSpec(
        name="c", embedding_dim=6, num_embeddings=7, feature_names=("c1",), pooling="mean",
        id_space="hash", init_std=0.1,
    ),
    TableSpec(
        name="d", embedding_dim=16, num_embeddings=13, feature_names=("d1",), out_of_range="clamp"
    ),
    TableSpec(
        name="e", embedding_dim=4, num_embeddings=9, feature_names=("e1", "e2"),
        out_of_range="zero",
    ),
)  # fmt: skip
LOOKUPS = (
    LookupSpec(feature_name="a2", table_name="a", pooling="none"),
    LookupSpec(feature_name="e2", table_name="e", pooling="mean"),
    LookupSpec(feature_name="e3", table_name="e", pooling="none"),
)
FEATURES = {"a1": 11, "a2": 11, "b1": 1, "c1": 2**62, "d1": 13, "e1": 9, "e2": 9, "e3": 9}
WIDTHS = {"a1": 4, "a2": 4, "b1": 8, "c1": 6, "d1": 16, "e1": 4, "e2": 4, "e3": 4}
WEIGHTED = ("a1", "d1", "e2")
STEPS = 3
# Sharding, optimizer, replicas, fully sharded.
Case = tuple[Sharding, OptimizerSpec, int, bool]
KINDS: tuple[Sharding, ...] = (
    "replicated", "table_wise", "row_wise", "column_wise", "table_row_wise", "grid",
)  # fmt: skip


def batch_of(
    step: int, rank: int
) -> tuple[dict[str, Jagged], dict[str, Tensor], dict[str, Tensor]]:
    """Ids, weights, and what each output is multiplied by in the loss."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    examples = 0 if (step, rank) in ((1, 1), (2, 0)) else 3
    ids, weights, factors = {}, {}, {}
    for name, rows in FEATURES.items():
        lengths = torch.randint(0, 4, (examples,), generator=draw)
        total = int(lengths.sum())
        low, high = (-2, rows + 2) if name[0] in "de" else (0, rows)
        values = torch.randint(low, high, (total,), generator=draw)
        ids[name] = Jagged.from_lengths(values, lengths)
        if name in WEIGHTED:
            weights[name] = torch.rand(total, generator=draw).requires_grad_()
        vectors = total if name in ("a2", "e3") else examples
        factors[name] = torch.randn(vectors, WIDTHS[name], generator=draw)
    return ids, weights, factors


def loss_of(outputs: Mapping[str, Tensor], factors: Mapping[str, Tensor]) -> Tensor:
    """A loss whose gradients differ from row to row and from step to step."""
    parts = [(out * factors[name] + 0.1 * out.square()).sum() for name, out in outputs.items()]
    return torch.stack(parts).sum()


def gradient_of(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


class Oracle:
    """One replica: unsharded tables that all ranks of a sharding group train together."""

    def __init__(self, weights: Mapping[str, Tensor], optimizer: OptimizerSpec) -> None:
        self.tables = EmbeddingTables(SPECS, LOOKUPS)
        for spec, param in zip(SPECS, self.tables.table_parameters(), strict=True):
            param.data.copy_(weights[spec.name])
        self.optimizer = table_optimizer(self.tables.table_parameters(), optimizer)

    def train(self, step: int, ranks: list[int]) -> dict[int, Any]:
        seen = {}
        for rank in ranks:
            ids, weights, factors = batch_of(step, rank)
            outputs = self.tables(ids, weights)
            (loss_of(outputs, factors) / len(ranks)).backward()
            grads = {name: gradient_of(w) * len(ranks) for name, w in weights.items()}
            seen[rank] = ({name: out.detach() for name, out in outputs.items()}, grads)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return seen


def average(oracles: list[Oracle]) -> None:
    """Replace weights and optimizer rows of all replicas by their mean."""
    with torch.no_grad():
        for params in zip(*(o.tables.table_parameters() for o in oracles), strict=True):
            states = [o.optimizer.state[p] for o, p in zip(oracles, params, strict=True)]
            for key in states[0]:
                if key != "step":
                    mean = torch.stack([state[key] for state in states]).mean(0)
                    for state in states:
                        state[key].copy_(mean)
            mean = torch.stack(list(params)).mean(0)
            for param in params:
                param.copy_(mean)


def plan_of(kind: Sharding, world: World, replicas: int, *, fully: bool) -> TablePlan:
    shard = world.size // replicas
    return place_tables(
        SPECS,
        {spec.name: kind for spec in SPECS if kind != "replicated"},
        table_shard=shard,
        table_replicate=replicas,
        fully_sharded=fully,
        host_ranks=2 if shard == 4 else None,
    )


def close(got: Tensor, want: Tensor, what: str) -> None:
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6, msg=lambda m: f"{what}: {m}")


def check_case(
    world: World, kind: Sharding, optimizer: OptimizerSpec, replicas: int, *, fully: bool, mesh: Any
) -> None:
    plan = plan_of(kind, world, replicas, fully=fully)
    engine = build_tables(SPECS, LOOKUPS, plan, optimizer, world, seed=7, mesh=mesh)
    start = {spec.name: engine.full_weight(spec.name) for spec in SPECS}
    oracles = [Oracle(start, optimizer) for _ in range(replicas)]
    own = world.rank % replicas
    name = f"{kind} {optimizer.kind} {world.size}/{replicas} fully={fully}"
    for step in range(STEPS):
        ids, weights, factors = batch_of(step, world.rank)
        outputs = engine(ids, weights)
        loss_of(outputs, factors).backward()
        seen = [
            oracle.train(step, [g * replicas + m for g in range(world.size // replicas)])
            for m, oracle in enumerate(oracles)
        ]
        if replicas > 1:
            average(oracles)
            engine.sync()
        want, grads = seen[own][world.rank]
        for feature, out in outputs.items():
            close(out.detach(), want[feature], f"{name} step {step} {feature}")
        for feature, weight in weights.items():
            close(gradient_of(weight), grads[feature], f"{name} step {step} weights of {feature}")
    for spec, param in zip(SPECS, oracles[own].tables.table_parameters(), strict=True):
        close(engine.full_weight(spec.name), param.detach(), f"{name} table {spec.name}")
        assert not torch.equal(param, start[spec.name])


def check_all(world: World, cases: Sequence[Case]) -> None:
    meshes: dict[int, Any] = {}
    for kind, optimizer, replicas, fully in cases:
        if world.size > 1 and replicas not in meshes:
            meshes[replicas] = init_device_mesh(
                "cpu", (world.size // replicas, replicas),
                mesh_dim_names=("table_shard", "table_replicate"),
            )  # fmt: skip
        check_case(world, kind, optimizer, replicas, fully=fully, mesh=meshes.get(replicas))


ADAGRAD = OptimizerSpec(lr=0.1)
ADAM = OptimizerSpec(kind="adam", lr=0.05)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_sharding_trains_as_unsharded_tables_do(ranks: int) -> None:
    cases: list[Case] = [(kind, spec, 1, False) for kind in KINDS for spec in (ADAGRAD, ADAM)]
    if ranks == 1:
        check_all(World(), cases)
    else:
        run_ranks(check_all, ranks, cases)


@pytest.mark.parametrize("ranks", [2, 4])
def test_replicas_hold_the_mean_of_what_each_has_learnt(ranks: int) -> None:
    scaled = OptimizerSpec(lr=0.1)
    cases: list[Case] = [
        (kind, spec, 2, fully)
        for kind in KINDS[:4]
        for spec, fully in ((scaled, False), (ADAGRAD, True), (ADAM, True))
    ]
    if ranks == 4:
        # Groups of one rank: nothing but means travels.
        cases.append(("row_wise", ADAGRAD, 4, True))
    run_ranks(check_all, ranks, cases)
