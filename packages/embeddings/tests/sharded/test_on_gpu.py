"""The torch engine on one GPU: the numbers of a CPU, and one wait of the host in each call."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gem_embeddings.contract import LookupSpec, OptimizerSpec, TableOptimizer, TableSpec
from gem_embeddings.engine import build_tables
from gem_embeddings.planning.layout import place_tables
from gem_embeddings.sharded.engine import TorchTables
from gem_jagged.batch import Jagged
from gem_parallel.launch import World

pytestmark = pytest.mark.gpu

SPECS = (
    TableSpec(name="a", embedding_dim=32, num_embeddings=500, feature_names=("a",), init_std=0.1),
    TableSpec(
        name="b", embedding_dim=12, num_embeddings=90, feature_names=("b",), pooling="mean",
        out_of_range="zero",
    ),
    TableSpec(
        name="c", embedding_dim=64, num_embeddings=70, feature_names=("c",), id_space="hash",
        row_dtype="bf16",
    ),
)  # fmt: skip
LOOKUPS = (LookupSpec(feature_name="d", table_name="a"),)
ROWS = {"a": 500, "b": 95, "c": 2**60, "d": 500}


def engine_on(device: str, kind: TableOptimizer) -> TorchTables:
    plan = place_tables(SPECS, {"a": "row_wise", "b": "table_wise", "c": "grid"}, table_shard=1)
    world = World(device=torch.device(device))
    engine = build_tables(SPECS, LOOKUPS, plan, OptimizerSpec(kind=kind, lr=0.05), world)
    assert isinstance(engine, TorchTables)
    return engine


def batch_of(step: int, device: str) -> tuple[dict[str, Jagged], dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(step)
    ids: dict[str, Jagged] = {}
    for name, rows in ROWS.items():
        lengths = torch.randint(0, 9, (64,), generator=draw)
        values = torch.randint(0, rows, (int(lengths.sum()),), generator=draw)
        ids[name] = Jagged.from_lengths(values, lengths).to(device)
    weights = torch.rand(ids["b"].total_tokens, generator=draw).to(device).requires_grad_()
    return ids, {"b": weights}


def loss_of(vectors: dict[str, Tensor]) -> Tensor:
    return torch.stack([(x * x.detach().cos()).sum() for x in vectors.values()]).sum()


@pytest.mark.parametrize("kind", ["rowwise_adagrad", "adagrad", "sgd", "adam"])
def test_a_gpu_learns_what_a_cpu_does(kind: TableOptimizer) -> None:
    engines = {device: engine_on(device, kind) for device in ("cpu", "cuda")}
    for name in ("a", "b", "c"):
        # Normal numbers may differ where the device's logarithm does, in the last bit.
        torch.testing.assert_close(
            engines["cuda"].full_weight(name).cpu(), engines["cpu"].full_weight(name)
        )
    for step in range(3):
        found: dict[str, Any] = {}
        for device, engine in engines.items():
            ids, weights = batch_of(step, device)
            vectors = engine(ids, weights)
            loss_of(vectors).backward()
            grad = weights["b"].grad
            assert grad is not None
            found[device] = [*(x.detach().cpu() for x in vectors.values()), grad.cpu()]
        for got, want in zip(found["cuda"], found["cpu"], strict=True):
            # bf16 rows: sums in another order may round to the other neighbour.
            torch.testing.assert_close(got, want, rtol=1e-3, atol=2e-2)
    for name in ("a", "b"):
        torch.testing.assert_close(
            engines["cuda"].full_weight(name).cpu(),
            engines["cpu"].full_weight(name),
            rtol=1e-3,
            atol=1e-4,
        )


def test_only_starting_a_lookup_waits_for_the_gpu() -> None:
    engine = engine_on("cuda", "rowwise_adagrad")
    ids, weights = batch_of(0, "cuda")
    loss_of(engine(ids, weights)).backward()  # compiles kernels
    torch.cuda.synchronize()
    started = engine.start(ids, weights)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss_of(engine(started)).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.warns(UserWarning, match="synchroniz") as seen:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            engine.start(ids, weights)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in seen if "synchroniz" in str(w.message)]) == 1
