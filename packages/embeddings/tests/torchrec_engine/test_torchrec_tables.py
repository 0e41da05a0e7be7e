"""The torchrec engine learns as whole tables do, under every plan that it takes.

The oracle holds whole tables in fp64, sees the batches of all ranks, and loops over examples; it
shares no code with the engine but the hash of ids.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from gem_embeddings.contract import LookupSpec, OptimizerSpec, TablePlan, TableSpec
from gem_embeddings.engine import build_tables
from gem_embeddings.hashing import hash_to_rows
from gem_embeddings.plan import place_tables
from gem_jagged.batch import Jagged
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks

pytestmark = pytest.mark.torchrec

# Wide enough for four ranks to hold columns that fbgemm can read.
WIDTH = 16


@dataclass(frozen=True)
class Case:
    """One plan on one number of ranks."""

    sharding: str
    ranks: int
    replicas: int = 1
    optimizer: OptimizerSpec = field(default_factory=lambda: OptimizerSpec(lr=0.1))
    host: int | None = None
    row_dtype: Any = "fp32"
    wire_dtype: Any = "fp32"
    pooled_only: bool = False
    weighted: bool = True


def specs_of(case: Case) -> tuple[list[TableSpec], list[LookupSpec]]:
    """Five tables: sums, means, hashed ids, one row, and one that is read in three ways."""
    low: dict[str, Any] = {"row_dtype": case.row_dtype}
    specs = [
        TableSpec(
            name="words",
            embedding_dim=WIDTH,
            num_embeddings=13,
            feature_names=("title", "text"),
            out_of_range="zero",
            **low,
        ),
        TableSpec(
            name="topics",
            embedding_dim=2 * WIDTH,
            num_embeddings=9,
            feature_names=("topic",),
            pooling="mean",
            id_space="hash",
            hash_seed=3,
            **low,
        ),
        TableSpec(
            name="single", embedding_dim=WIDTH, num_embeddings=1, feature_names=("bias",), **low
        ),
    ]
    lookups: list[LookupSpec] = [
        LookupSpec(feature_name="mean", table_name="words", pooling="mean")
    ]
    if not case.pooled_only:
        specs.append(
            TableSpec(
                name="items",
                embedding_dim=WIDTH,
                num_embeddings=11,
                feature_names=("liked",),
                pooling="mean",
                out_of_range="clamp",
                **low,
            )
        )
        lookups += [
            LookupSpec(feature_name="history", table_name="items"),
            LookupSpec(feature_name="sum", table_name="items", pooling="sum"),
        ]
    return specs, lookups


def plan_of(case: Case, specs: Sequence[TableSpec]) -> TablePlan:
    """All tables cut in one way, or each in another."""
    mixed = ("replicated", "row_wise", "table_wise", "table_wise")
    kinds: Any = {
        spec.name: mixed[index] if case.sharding == "mixed" else case.sharding
        for index, spec in enumerate(specs)
    }
    return place_tables(
        specs,
        kinds,
        table_shard=case.ranks // case.replicas,
        table_replicate=case.replicas,
        host_ranks=case.host,
    )


def batch_of(case: Case, rank: int, step: int) -> tuple[dict[str, Jagged], dict[str, Tensor]]:
    """Ids and weights of one rank: batches of different sizes, an empty one in step 1 of rank 0."""
    made = torch.Generator().manual_seed(1000 * rank + step)
    examples = 0 if (rank == 0 and step == 1 and case.ranks > 1) else 3 + rank
    bounds = {"title": (-2, 15), "text": (0, 13), "mean": (0, 13), "bias": (0, 1)}
    bounds |= {"topic": (-(2**40), 2**40), "liked": (-3, 14), "history": (0, 14), "sum": (0, 11)}
    ids: dict[str, Jagged] = {}
    for name, (low, high) in bounds.items():
        lengths = torch.randint(0, 4, (examples,), generator=made)
        values = torch.randint(low, high, (int(lengths.sum()),), generator=made)
        ids[name] = Jagged.from_lengths(values, lengths)
    # In step 2 the last rank gives none, which stands for 1.
    none = not case.weighted or (step == 2 and rank == case.ranks - 1)
    weighted = [] if none else ["text", "sum"]
    weights = {n: torch.rand(ids[n].total_tokens, generator=made) for n in weighted}
    if case.pooled_only:
        weights.pop("sum", None)
    return ids, weights


def pull_of(out: Tensor, name: str, step: int) -> Tensor:
    """What the output of a feature is multiplied by in the loss."""
    count = torch.arange(out.numel(), dtype=torch.float64).view(out.shape)
    return torch.cos(count * (1 + len(name)) + step)


class Oracle:
    """Whole tables in fp64, one copy for each sharding group."""

    def __init__(self, case: Case, tables: dict[str, Tensor]) -> None:
        self.case = case
        self.specs, self.lookups = specs_of(case)
        self.group = [{n: t.double() for n, t in tables.items()} for _ in range(case.replicas)]
        self.state = [{n: torch.zeros_like(t) for n, t in g.items()} for g in self.group]
        self.poolings = {n: (s, s.pooling) for s in self.specs for n in s.feature_names}
        by_name = {s.name: s for s in self.specs}
        self.poolings |= {x.feature_name: (by_name[x.table_name], x.pooling) for x in self.lookups}

    def rows(self, spec: TableSpec, ids: Tensor) -> list[int | None]:
        """Row of each id; None for one that is read as zeros."""
        if spec.id_space == "hash":
            return hash_to_rows(ids, spec.num_embeddings, seed=spec.hash_seed).tolist()
        last = spec.num_embeddings - 1
        if spec.out_of_range == "clamp":
            return [min(max(i, 0), last) for i in ids.tolist()]
        return [i if 0 <= i <= last else None for i in ids.tolist()]

    def look_up(
        self, tables: dict[str, Tensor], ids: dict[str, Jagged], weights: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Look every feature up, example by example."""
        outputs: dict[str, Tensor] = {}
        for name, (spec, pooling) in self.poolings.items():
            table = tables[spec.name]
            zero = table.new_zeros(spec.embedding_dim)
            rows = self.rows(spec, ids[name].values)
            vectors = [zero if r is None else table[r] for r in rows]
            if name in weights:
                vectors = [v * w for v, w in zip(vectors, weights[name].double(), strict=True)]
            if pooling == "none":
                outputs[name] = torch.stack(vectors) if vectors else table.new_zeros(0, len(zero))
                continue
            found, begin = [], 0
            for length in ids[name].lengths.tolist():
                total = sum(vectors[begin : begin + length], zero)
                found.append(total / max(1, length) if pooling == "mean" else total)
                begin += length
            outputs[name] = torch.stack(found) if found else table.new_zeros(0, len(zero))
        return outputs

    def step(self, step: int) -> list[dict[str, Tensor]]:
        """Train one step on the batches of all ranks; return the outputs of each."""
        outputs: list[dict[str, Tensor]] = [{}] * self.case.ranks
        for replica, tables in enumerate(self.group):
            leaves = {n: t.clone().requires_grad_() for n, t in tables.items()}
            # A group whose batches are empty has a loss that depends on nothing.
            total = sum(leaf.sum() * 0 for leaf in leaves.values())
            for rank in range(replica, self.case.ranks, self.case.replicas):
                found = self.look_up(leaves, *batch_of(self.case, rank, step))
                outputs[rank] = {n: o.detach() for n, o in found.items()}
                total = total + sum((o * pull_of(o, n, step)).sum() for n, o in found.items())
            (total / (self.case.ranks // self.case.replicas)).backward()
            for name, leaf in leaves.items():
                self.move(replica, name, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
        return outputs

    def move(self, replica: int, name: str, grad: Tensor) -> None:
        """Move one table by the rule of the optimizer."""
        spec = self.case.optimizer
        table, state = self.group[replica][name], self.state[replica][name]
        if spec.kind == "sgd":
            table -= spec.lr * grad
            return
        square = grad.square()
        if spec.kind == "rowwise_adagrad":
            square = square.mean(dim=1, keepdim=True).expand_as(grad)
        state += square
        table -= spec.lr * grad / ((state / spec.moment_scale).sqrt() + spec.eps)

    def sync(self) -> None:
        """Average tables and states over the groups."""
        for copies in (self.group, self.state):
            for name in copies[0]:
                mean = torch.stack([c[name] for c in copies]).mean(dim=0)
                for copy in copies:
                    copy[name].copy_(mean)


def run_case(world: World, case: Case) -> dict[str, float]:
    """Train three steps beside the oracle, and return how far apart they are."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    specs, lookups = specs_of(case)
    engine = build_tables(
        specs,
        lookups,
        plan_of(case, specs),
        case.optimizer,
        world,
        engine="torchrec",
        wire_dtype=case.wire_dtype,
        seed=5,
    )
    engine.set_lr(7.0)
    oracle = Oracle(case, {spec.name: engine.full_weight(spec.name).cpu() for spec in specs})
    far = {"out": 0.0, "weight": 0.0}

    def given(step: int) -> tuple[dict[str, Jagged], dict[str, Tensor]]:
        ids, weights = batch_of(case, world.rank, step)
        return (
            {name: one.to(world.device) for name, one in ids.items()},
            {name: one.to(world.device) for name, one in weights.items()},
        )

    begun = engine.start(*given(0))
    for step in range(3):
        expected = oracle.step(step)[world.rank]
        engine.set_lr(case.optimizer.lr)
        found = engine(begun)
        # The next ids travel before this step moves the rows.
        begun = engine.start(*given(step + 1))
        assert found.keys() == expected.keys()
        for name, out in found.items():
            assert out.shape == expected[name].shape, name
            if out.numel():
                far["out"] = max(
                    far["out"], float((out.detach().cpu() - expected[name]).abs().max())
                )
        sum((o * pull_of(o, n, step).to(o)).sum() for n, o in found.items()).backward()
        if step == 1:
            engine.sync()
            oracle.sync()
        engine.set_lr(7.0)
    replica = world.rank % case.replicas
    for spec in specs:
        found = engine.full_weight(spec.name).cpu()
        apart = (found - oracle.group[replica][spec.name]).abs().max()
        far["weight"] = max(far["weight"], float(apart))
    far["step"] = engine.step
    return far


ADAGRAD = OptimizerSpec(kind="adagrad", lr=0.1)
SGD = OptimizerSpec(kind="sgd", lr=0.1)
SCALED = OptimizerSpec(lr=0.1, moment_scale=2)
CASES = {
    1: [
        Case("replicated", 1),
        Case("row_wise", 1, optimizer=SGD),
        Case("table_wise", 1, optimizer=ADAGRAD),
        Case("table_wise", 1, row_dtype="fp16"),
    ],
    2: [
        Case("table_wise", 2),
        Case("row_wise", 2),
        Case("column_wise", 2, optimizer=ADAGRAD),
        Case("table_wise", 2, replicas=2, optimizer=SCALED),
        Case("row_wise", 2, row_dtype="fp16", optimizer=SGD),
        Case("table_wise", 2, wire_dtype="fp16"),
        Case("replicated", 2, optimizer=ADAGRAD),
    ],
    4: [
        Case("table_wise", 4, optimizer=SGD),
        Case("row_wise", 4),
        Case("row_wise", 4, replicas=2, optimizer=ADAGRAD),
        Case("column_wise", 4, optimizer=ADAGRAD),
        Case("table_row_wise", 4, host=2, pooled_only=True),
        Case("grid", 4, host=2, optimizer=ADAGRAD, pooled_only=True),
        Case("table_row_wise", 4, replicas=2, host=2, pooled_only=True),
        Case("mixed", 4, optimizer=SCALED),
        Case("mixed", 4, replicas=2),
    ],
}
# Of three steps on weights below 1: fp32 as fp32 rounds, fp16 as 11 bits do.
BANDS = {"fp32": 2e-6, "fp16": 4e-3}


def run_cases(world: World) -> list[dict[str, float]]:
    """Run all cases of this number of ranks in one set of processes."""
    return [run_case(world, case) for case in CASES[world.size]]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_equals_whole_tables(ranks: int) -> None:
    cases = CASES[ranks]
    found = run_ranks(run_cases, ranks)
    for rank in found:
        for case, far in zip(cases, rank, strict=True):
            low = "fp16" in (case.row_dtype, case.wire_dtype)
            band = BANDS["fp16" if low else "fp32"]
            assert far["out"] < band, (case, far)
            assert far["weight"] < band, (case, far)
            assert far["step"] == 3, case


@pytest.mark.gpu
def test_equals_whole_tables_on_a_gpu() -> None:
    world = World(device=torch.device("cuda", 0))
    for case in CASES[1]:
        far = run_case(world, case)
        band = BANDS[case.row_dtype]
        assert far["out"] < band, (case, far)
        assert far["weight"] < band, (case, far)
