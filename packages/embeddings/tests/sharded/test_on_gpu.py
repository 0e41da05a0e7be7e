"""The torch engine on one GPU: the numbers of a CPU, and at most one wait of the host a call."""

import pytest
import torch
from torch import Tensor

from gem_embeddings.contract import LookupSpec, OptimizerSpec, TableOptimizer, TableSpec
from gem_embeddings.engine import Update, build_tables
from gem_embeddings.planning.layout import place_tables
from gem_embeddings.sharded.engine import TorchTables
from gem_jagged.batch import Jagged
from gem_parallel.launch import World
from gem_parallel.testing import one_rank_group

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
EXAMPLES, LONGEST, STEPS = 64, 8, 3
# The rate over eps is 1, so that a rule moves a row by no more than twice what moves its gradient.
LR = EPS = 0.05
UNIT = 2.0**-24


def engine_on(
    device: str, kind: TableOptimizer, update: Update = "backward", world: World | None = None
) -> TorchTables:
    plan = place_tables(SPECS, {"a": "row_wise", "b": "table_wise", "c": "grid"}, table_shard=1)
    world = World(device=torch.device(device)) if world is None else world
    rule = OptimizerSpec(kind=kind, lr=LR, eps=EPS)
    engine = build_tables(SPECS, LOOKUPS, plan, rule, world, update=update)
    assert isinstance(engine, TorchTables)
    return engine


def batch_of(step: int, device: str) -> tuple[dict[str, Jagged], dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(step)
    ids: dict[str, Jagged] = {}
    for name, rows in ROWS.items():
        lengths = torch.randint(0, LONGEST + 1, (EXAMPLES,), generator=draw)
        values = torch.randint(0, rows, (int(lengths.sum()),), generator=draw)
        ids[name] = Jagged.from_lengths(values, lengths).to(device)
    weights = torch.rand(ids["b"].total_tokens, generator=draw).to(device).requires_grad_()
    return ids, {"b": weights}


def loss_of(vectors: dict[str, Tensor], step: int) -> Tensor:
    """A loss whose gradients of outputs are at most 1 and do not depend on the rows."""
    draw = torch.Generator().manual_seed(100 + step)
    parts = [
        (x * (2 * torch.rand(x.shape, generator=draw) - 1).to(x.device)).sum()
        for x in vectors.values()
    ]
    return torch.stack(parts).sum()


def moved_apart() -> float:
    """How far an element of an fp32 row may end from that of the other device after all steps.

    In a step its gradient is a sum of at most n numbers below 1, which two orders of addition form
    with errors of n units of n; the rules turn an error of a gradient into one of at most twice it,
    and the row is rounded once.
    """
    bound = 0.0
    for step in range(STEPS):
        ids, _ = batch_of(step, "cpu")
        named = (torch.cat([ids["a"].values, ids["d"].values]), ids["b"].values)
        most = max(int(rows.bincount().max()) for rows in named)
        bound += 2 * 2 * most * most * UNIT + UNIT
    return bound


@pytest.mark.parametrize("kind", ["rowwise_adagrad", "adagrad", "sgd", "adam"])
def test_a_gpu_learns_what_a_cpu_does(kind: TableOptimizer) -> None:
    engines = {device: engine_on(device, kind) for device in ("cpu", "cuda")}
    for name in ("a", "b", "c"):
        # Normal numbers may differ where the device's logarithm does, in the last bit.
        torch.testing.assert_close(
            engines["cuda"].full_weight(name).cpu(), engines["cpu"].full_weight(name)
        )
    start = 2 * UNIT  # of rows below 1, of that last bit
    apart = start + moved_apart()
    # Sums of at most so many numbers below 1, in another order: of rows for an output, of the
    # elements of a row for the gradient of a weight.
    terms = max(LONGEST, SPECS[1].embedding_dim)
    near = terms * apart + terms * terms * UNIT
    for step in range(STEPS):
        outputs: dict[str, dict[str, Tensor]] = {}
        grads: dict[str, Tensor] = {}
        for device, engine in engines.items():
            ids, weights = batch_of(step, device)
            vectors = engine(ids, weights)
            loss_of(vectors, step).backward()
            grad = weights["b"].grad
            assert grad is not None
            outputs[device] = {name: x.detach().cpu() for name, x in vectors.items()}
            grads[device] = grad.cpu()
        torch.testing.assert_close(grads["cuda"], grads["cpu"], rtol=0, atol=near)
        for name, want in outputs["cpu"].items():
            got = outputs["cuda"][name]
            if name != "c":
                torch.testing.assert_close(got, want, rtol=0, atol=near, msg=name)
                continue
            # bf16 rows are rounded by chance, with equal draws: a row that lies where the draw
            # decides goes to the other neighbour, 1/256 away below 1. That is rare.
            off = (got - want).abs()
            assert off.max() <= LONGEST * 2.0**-8 + near
            assert (off > near).float().mean() < 0.01
    for name in ("a", "b"):
        torch.testing.assert_close(
            engines["cuda"].full_weight(name).cpu(),
            engines["cpu"].full_weight(name),
            rtol=0,
            atol=apart,
        )


@pytest.mark.parametrize("update", ["backward", "step"])
def test_only_starting_a_lookup_waits_for_the_gpu(update: Update) -> None:
    engine = engine_on("cuda", "rowwise_adagrad", update)
    ids, weights = batch_of(0, "cuda")
    loss_of(engine(ids, weights), 0).backward()  # compiles kernels
    if update == "step":
        engine.apply()
    # Other numbers of ids than before: nothing of them is known from a call before.
    ids, weights = batch_of(1, "cuda")
    torch.cuda.synchronize()
    started = engine.start(ids, weights)
    torch.cuda.set_sync_debug_mode("error")
    try:
        vectors = engine(started)
        torch.stack([x.sum() for x in vectors.values()]).sum().backward()
        if update == "step":
            engine.held_finite()
            engine.apply()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # The device is busy: sizes cannot have come yet.
    torch.cuda._sleep(50_000_000)
    before = engine.waits
    engine.start(ids, weights)
    assert engine.waits == before + 1


def test_a_lookup_that_was_started_ahead_waits_for_nothing() -> None:
    ids, _ = batch_of(0, "cuda")
    alone = engine_on("cuda", "rowwise_adagrad", "step")
    with one_rank_group("replicate", torch.device("cuda", 0)) as world:
        engine = engine_on("cuda", "rowwise_adagrad", "step", world)
        for step in range(3):  # the first compiles kernels
            for each in (alone, engine):
                if step == 2 and each is engine:
                    torch.cuda.set_sync_debug_mode("error")
                try:
                    started = each.start_ahead(ids) if each is engine else each.start(ids)
                    if each is engine:
                        while not torch.cuda.current_stream().query():
                            pass
                    found = each(started)
                    loss_of_sums(found).backward()
                    each.apply()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
        assert engine.waits == 0
        for name in ("a", "b"):
            assert torch.equal(engine.full_weight(name), alone.full_weight(name))


def loss_of_sums(vectors: dict[str, Tensor]) -> Tensor:
    """A loss that is made on the device alone."""
    return torch.stack([x.square().sum() for x in vectors.values()]).sum()
