"""Time lookup, gradient and optimizer step of 25 tables, as a small ranking model has them.

Eight tables are looked up by an event stream and by the example, seventeen by the example alone.
The peer is ``F.embedding`` with torch's own optimizers: sparse gradients with ``SparseAdam``, which
moves seen rows only as ours do, and dense gradients with ``Adam``, which moves every row.

Run ``python packages/embeddings/benchmarks/bench_tables.py`` in the repository's root.
"""

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gem_embeddings.contract import OptimizerSpec, TableSpec
from gem_embeddings.costs import lookup_backward_cost, lookup_cost, optimizer_cost
from gem_embeddings.optimizer import table_optimizer
from gem_embeddings.tables import EmbeddingTables
from gem_jagged.batch import Jagged
from gem_opkit.bench import BenchCase, run_bench
from gem_opkit.cost import Cost

STREAM_ROWS = (1682, 943, 2, 21, 3000, 100, 24, 7)
EXAMPLE_ROWS = (12, 50, *(20,) * 12, 31, 60, 19)
HISTORY = 100


class Workload:
    """Ids of one batch, our tables, and the peer's weights with the same values."""

    def __init__(self, examples: int, embedding_dim: int, device: str) -> None:
        lengths = torch.randint(HISTORY // 3, HISTORY + 1, (examples,))
        events = int(lengths.sum())
        specs = []
        self.ids: dict[str, Jagged] = {}
        for index, rows in enumerate((*STREAM_ROWS, *EXAMPLE_ROWS)):
            features = {f"example_{index}": [1] * examples}
            if index < len(STREAM_ROWS):
                features[f"event_{index}"] = lengths
            for name, counts in features.items():
                total = events if counts is lengths else examples
                drawn = Jagged.from_lengths(torch.randint(0, rows, (total,)), counts)
                self.ids[name] = drawn.to(device)
            specs.append(
                TableSpec(
                    name=f"table_{index}",
                    embedding_dim=embedding_dim,
                    num_embeddings=rows,
                    feature_names=tuple(features),
                    pooling="none",
                )
            )
        self.tables = EmbeddingTables(specs, device=device)
        self.joined = [
            torch.cat([self.ids[name].values for name in spec.feature_names]) for spec in specs
        ]
        self.examples, self.events, self.embedding_dim = examples, events, embedding_dim

    def look_up(self) -> list[Tensor]:
        """Look up every feature with our tables."""
        return list(self.tables(self.ids).values())

    def peer_weights(self) -> list[nn.Parameter]:
        """Copy the tables' weights for a peer."""
        return [nn.Parameter(p.detach().clone()) for p in self.tables.table_parameters()]

    def peer(self, weights: list[nn.Parameter], *, sparse: bool) -> list[Tensor]:
        """Look up every feature as the peer does, one call a table."""
        pairs = zip(self.joined, weights, strict=True)
        return [F.embedding(ids, weight, sparse=sparse) for ids, weight in pairs]

    def costs(self) -> dict[str, Cost]:
        """Return the cost of each timed pass over all tables."""
        ids = [joined.shape[0] for joined in self.joined]
        rows = [joined.unique().shape[0] for joined in self.joined]
        width = self.embedding_dim
        return {
            "forward": sum(
                (
                    lookup_cost(ids=n, vectors=n, rows=r, embedding_dim=width)
                    for n, r in zip(ids, rows, strict=True)
                ),
                Cost(0, 0),
            ),
            "backward": sum(
                (
                    lookup_backward_cost(ids=n, vectors=n, rows=r, embedding_dim=width)
                    for n, r in zip(ids, rows, strict=True)
                ),
                Cost(0, 0),
            ),
            **{
                kind: sum(
                    (
                        optimizer_cost(OptimizerSpec(kind=kind), rows=r, embedding_dim=width)
                        for r in rows
                    ),
                    Cost(0, 0),
                )
                for kind in ("rowwise_adagrad", "adam")
            },
        }


def backward(outputs: list[Tensor], weights: list[nn.Parameter]) -> Callable[[], Any]:
    upstream = [torch.randn_like(out) for out in outputs]
    return lambda: torch.autograd.grad(outputs, weights, upstream, retain_graph=True)


def check_forward(load: Workload) -> None:
    ours = load.tables(load.ids)
    for spec, expected in zip(
        load.tables.specs, load.peer(load.peer_weights(), sparse=False), strict=True
    ):
        got = torch.cat([ours[name] for name in spec.feature_names])
        if not torch.equal(got, expected):
            raise ValueError(f"{spec.name}: vectors differ from those of F.embedding")


def check_backward(load: Workload) -> None:
    weights = load.peer_weights()
    ours, peers = load.tables(load.ids), load.peer(weights, sparse=False)
    upstream = [torch.randn_like(out) for out in peers]
    parts = []
    for spec, up in zip(load.tables.specs, upstream, strict=True):
        parts += up.split([ours[name].shape[0] for name in spec.feature_names])
    mine = torch.autograd.grad(list(ours.values()), load.tables.table_parameters(), parts)
    theirs = torch.autograd.grad(peers, weights, upstream)
    for got, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got.to_dense(), expected)


def check_step(load: Workload, kind: str) -> None:
    """Compare one step from a fresh state with the formula."""
    before = [p.detach().clone() for p in load.tables.table_parameters()]
    spec = OptimizerSpec(kind=kind)
    optimizer = table_optimizer(load.tables.table_parameters(), spec)
    set_gradients(load)
    optimizer.step()
    for old, weight in zip(before, load.tables.table_parameters(), strict=True):
        grad = weight.grad.to_dense()
        if kind == "adam":
            expected = old - spec.lr * grad / (grad.abs() + spec.eps)
        else:
            root = grad.square().mean(dim=1, keepdim=True).sqrt() + spec.eps
            expected = old - spec.lr * grad / root
        torch.testing.assert_close(weight.detach(), expected)
        weight.data.copy_(old)


def set_gradients(load: Workload) -> None:
    load.tables.zero_grad()
    torch.autograd.backward(
        load.look_up(), [torch.ones_like(out) / out.shape[0] for out in load.look_up()]
    )


def step_of_peer(load: Workload, kind: type, *, sparse: bool) -> Callable[[], Any]:
    weights = load.peer_weights()
    outputs = load.peer(weights, sparse=sparse)
    torch.autograd.backward(outputs, [torch.ones_like(out) / out.shape[0] for out in outputs])
    return kind(weights).step


def make_cases(load: Workload) -> list[BenchCase]:
    name = f"tables_25_examples_{load.examples}_width_{load.embedding_dim}"
    shapes = {
        "rows": [*STREAM_ROWS, *EXAMPLE_ROWS],
        "examples": load.examples,
        "events": load.events,
        "streams": len(STREAM_ROWS),
        "embedding_dim": load.embedding_dim,
    }
    costs = load.costs()
    weights = load.peer_weights()
    set_gradients(load)
    cases = [
        BenchCase(
            name=f"{name}_forward",
            run=load.look_up,
            check=lambda: check_forward(load),
            cost=costs["forward"],
            shapes=shapes,
            peers={"F.embedding": lambda: load.peer(weights, sparse=True)},
        ),
        BenchCase(
            name=f"{name}_backward",
            run=backward(load.look_up(), load.tables.table_parameters()),
            check=lambda: check_backward(load),
            cost=costs["backward"],
            shapes=shapes,
            peers={"dense F.embedding": backward(load.peer(weights, sparse=False), weights)},
        ),
    ]
    for kind in ("rowwise_adagrad", "adam"):
        optimizer = table_optimizer(load.tables.table_parameters(), OptimizerSpec(kind=kind))
        cases.append(
            BenchCase(
                name=f"{name}_{kind}",
                run=optimizer.step,
                check=lambda kind=kind: check_step(load, kind),
                cost=costs[kind],
                shapes=shapes,
                peers={
                    "SparseAdam": step_of_peer(load, torch.optim.SparseAdam, sparse=True),
                    "dense Adam": step_of_peer(load, torch.optim.Adam, sparse=False),
                },
            )
        )
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--embedding-dim", type=int, default=32)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(0)
    cases = []
    for examples in (128, 512):
        cases += make_cases(Workload(examples, given.embedding_dim, given.device))
    run_bench("tables", cases, device=given.device, out=given.out, calls=given.calls)


if __name__ == "__main__":
    main()
