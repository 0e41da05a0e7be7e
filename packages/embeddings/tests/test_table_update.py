import sys
from pathlib import Path

import pytest
import torch

from gem_embeddings.contract import OptimizerSpec, TableSpec
from gem_embeddings.kernels.table_update.cost import table_update_cost
from gem_embeddings.ops import TableLayout, table_lookup, table_update
from gem_embeddings.optimizer import table_optimizer
from gem_embeddings.rules import STATE_NAMES
from gem_embeddings.tables import EmbeddingTables
from gem_jagged.batch import Jagged
from gem_opkit.errors import ConfigError, DeviceError, DtypeError, ShapeError, UnsupportedError
from gem_opkit.testing import (
    LENGTH_CASES,
    check_budget,
    check_refuses,
    check_registration,
    count_launches,
    length_case_id,
    poisoned_empty,
)

sys.path.insert(0, str(Path(__file__).parent))

from table_calls import batch_of, row_gradients, spoilt

LENGTHS = (3, 0, 6, 1)
SPECS = [
    OptimizerSpec(kind="rowwise_adagrad", lr=0.1, eps=1e-6),
    OptimizerSpec(kind="rowwise_adagrad", lr=0.1, eps=1e-6, moment_scale=4.0),
    OptimizerSpec(kind="adagrad", lr=0.1, eps=1e-6),
    OptimizerSpec(kind="sgd", lr=0.1),
    OptimizerSpec(kind="adam", lr=0.1, eps=1e-6, beta1=0.8, beta2=0.95),
]
STEP, GRAD_SCALE = 3, 0.25


def spec_id(spec):
    return spec.kind if spec.moment_scale == 1.0 else "scaled"


def states_of(spec, layout, dtype=torch.float32):
    draw = torch.Generator().manual_seed(3)
    size = layout.rows if spec.kind == "rowwise_adagrad" else layout.elements
    return [torch.rand(size, generator=draw).to(dtype) for _ in STATE_NAMES[spec.kind]]


def grad_of(weights, ids, bags, id_weights, layout, counts):
    flat, _ = table_lookup(weights, ids, bags, layout, counts=counts, impl="reference")
    return torch.randn(flat.shape, generator=torch.Generator().manual_seed(4))


def updated(batch, spec, *, dtype=torch.float32, device="cpu", seed=None, impl="auto", grad=None):
    """Return weights and states after one update; fp32 inputs are cast."""
    weights, ids, bags, id_weights, layout, counts = batch
    grad = grad_of(*batch) if grad is None else grad
    weights = weights.to(device=device, dtype=dtype, copy=True)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    states = [state.to(device) for state in states_of(spec, layout, wide)]
    table_update(
        weights, states, ids.to(device), bags.to(device), grad.to(device), layout,
        counts=counts, spec=spec, step=STEP, id_weights_I=id_weights.to(device),
        grad_scale=GRAD_SCALE, seed=seed, impl=impl,
    )  # fmt: skip
    return [weights.cpu(), *(state.cpu() for state in states)]


def rule_by_hand(batch, spec):
    """The rules of the module's docstring, row by row, in fp64."""
    weights, ids, bags, id_weights, layout, counts = batch
    weights, states = weights.double(), states_of(spec, layout, torch.float64)
    sums = row_gradients(grad_of(*batch), ids, bags, id_weights, layout, counts)
    for row, g in sums.items():
        g = g * GRAD_SCALE
        table = next(t for t in layout.tables if t.row_offset <= row < t.row_offset + t.rows)
        at = table.offset + (row - table.row_offset) * table.width
        here = slice(at, at + table.width)
        if spec.kind == "sgd":
            weights[here] -= spec.lr * g
        elif spec.kind == "rowwise_adagrad":
            states[0][row] += (g * g).sum() / table.width
            weights[here] -= spec.lr * g / ((states[0][row] / spec.moment_scale) ** 0.5 + spec.eps)
        elif spec.kind == "adagrad":
            states[0][here] += g * g
            weights[here] -= spec.lr * g / (states[0][here] ** 0.5 + spec.eps)
        else:
            states[0][here] = spec.beta1 * states[0][here] + (1 - spec.beta1) * g
            states[1][here] = spec.beta2 * states[1][here] + (1 - spec.beta2) * g * g
            mean = states[0][here] / (1 - spec.beta1**STEP)
            square = states[1][here] / (1 - spec.beta2**STEP)
            weights[here] -= spec.lr * mean / (square**0.5 + spec.eps)
    return [weights, *states]


def check_kernel(batch, spec, **options):
    low = updated(batch, spec, impl="reference")
    with poisoned_empty("all"), count_launches() as launches:
        kernel = updated(batch, spec, impl="triton", **options)
    assert launches.count >= 3
    for name, a, b, c in zip(
        ("weights", *STATE_NAMES[spec.kind]), kernel, low, rule_by_hand(batch, spec), strict=True
    ):
        check_budget(a, b, c, what=f"{spec_id(spec)}: {name}", noise_scale=1.0)


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_reference_gradients(spec):
    batch = batch_of(LENGTHS)
    for got, expected in zip(
        updated(batch, spec, dtype=torch.float64), rule_by_hand(batch, spec), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("spec", SPECS[2:], ids=spec_id)
def test_registration(spec):
    weights, ids, bags, id_weights, layout, counts = batch = batch_of(LENGTHS)
    states = (*states_of(spec, layout), None, None)[:2]
    check_registration(
        torch.ops.gem_embeddings.table_update,
        (
            weights, *states, ids, bags, grad_of(*batch), id_weights, layout.slots, counts,
            spec.kind, 0.1, 1e-6, 0.9, 0.99, 1.0, 1.0, 1, None, "reference",
        ),
        cost=table_update_cost(
            spec, ids=[10] * 4, vectors=[4, 10, 4, 4], rows=[10] * 4, widths=[4, 6, 6, 4],
            weighted=True,
        ),
    )  # fmt: skip


def test_compiles_whole():
    spec = SPECS[0]

    def call(weights, state, ids, bags, grad, layout, counts):
        table_update(weights, [state], ids, bags, grad, layout, counts=counts, spec=spec)
        return weights * 1, state * 1

    whole = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ((3, 0, 5), (2, 7, 2)):
        weights, ids, bags, _, layout, counts = batch = batch_of(lengths)
        (state,), grad = states_of(spec, layout), grad_of(*batch)
        given = [(weights.clone(), state.clone()) for _ in range(2)]
        got = whole(*given[0], ids, bags, grad, layout, counts)
        expected = call(*given[1], ids, bags, grad, layout, counts)
        assert not torch.equal(weights, expected[0])
        for a, b in zip((*given[0], *got), (*given[1], *expected), strict=True):
            assert torch.equal(a, b)


@pytest.mark.interpreter
@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_interpreted_kernel(spec, monkeypatch):
    import gem_embeddings.merging.kernel as merging

    # So few ids a stretch that a run goes on over many of them, and so few parts at a time that
    # they are added up in several turns.
    monkeypatch.setattr(merging, "_SPAN", 2)
    monkeypatch.setattr(merging, "_PARTS", 8)
    monkeypatch.setattr(merging, "_FAN", 4)
    check_kernel(batch_of((3, 0, 25), hot=True), spec)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_kernel_on_gpu(spec):
    # The last table is wider than a tile; with row-wise AdaGrad only, for each width compiles anew.
    shapes = [(70, 64), (90, 130)] if spec is SPECS[0] else [(700, 64), (90, 64)]
    batch = batch_of((30, 0, 5, 900, 1), shapes=shapes, hot=True)
    check_kernel(batch, spec, device="cuda")
    again = [updated(batch, spec, device="cuda") for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*again, strict=True))


@pytest.mark.parametrize("case", LENGTH_CASES, ids=length_case_id)
def test_ragged_edges(case):
    batch = batch_of(case.lengths)
    got = updated(batch, SPECS[0], dtype=torch.float64)
    for a, b in zip(got, rule_by_hand(batch, SPECS[0]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.interpreter
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_alone_equals_in_batch(impl):
    # A table learns the same bits whether other tables are looked up beside it or not.
    shapes, features = [(7, 4), (9, 8)], [(0, "sum"), (1, "mean")]
    weights, ids, bags, id_weights, layout, counts = batch = batch_of(
        LENGTHS, shapes=shapes, features=features
    )
    grad = grad_of(*batch)
    together = updated(batch, SPECS[0], impl=impl)
    alone = TableLayout(layout.tables, layout.features[:1])
    batch = (weights, ids[:10], bags[:5], id_weights[:10], alone, counts[:1])
    first = updated(batch, SPECS[0], impl=impl, grad=grad[:16])
    assert torch.equal(first[0][:28], together[0][:28])
    assert torch.equal(first[1][:7], together[1][:7])
    assert torch.equal(first[0][28:], weights[28:])


def test_refuses():
    weights, ids, bags, _, layout, counts = batch = batch_of(LENGTHS)
    given = {
        "weights_N": weights, "states": states_of(SPECS[0], layout), "ids_I": ids, "bags_O": bags,
        "grad": grad_of(*batch), "layout": layout, "counts": counts, "spec": SPECS[0],
    }  # fmt: skip
    short = [torch.zeros(3)]
    changes = [
        ({"grad": given["grad"][:-1]}, ShapeError, "grad must have the 116 elements"),
        ({"states": []}, ShapeError, "states must be sum for rowwise_adagrad"),
        ({"states": short}, ShapeError, "at least 16 values"),
        ({"states": [torch.zeros(16).half()]}, DtypeError, "'sum' must be torch.float32"),
        ({"states": [torch.zeros(16, device="meta")]}, DeviceError, "must be on cpu"),
        ({"spec": SPECS[-1]}, ShapeError, "exp_avg, exp_avg_sq"),
        ({"lr": -1.0}, ConfigError, "lr must be at least 0"),
        ({"step": 0}, ConfigError, "step must be at least 1"),
        ({"grad_scale": float("nan")}, ConfigError, "grad_scale must be finite"),
        ({"seed": 2**63}, ConfigError, "seed must fit in 64 bits"),
        ({"bags_O": spoilt(bags, {-1: 39})}, ShapeError, "run from 30 to 40 for feature 3; got 30"),
        ({"impl": "fast"}, UnsupportedError, "impl must be one of"),
    ]
    check_refuses(
        [(lambda c=c: table_update(**{**given, **c}), error, text) for c, error, text in changes]
    )


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    batch = [x.cuda() if isinstance(x, torch.Tensor) else x for x in batch_of(LENGTHS)]
    weights, ids, bags, id_weights, layout, counts = batch
    grad, (state,) = grad_of(*batch_of(LENGTHS)).cuda(), states_of(SPECS[0], layout)
    state = state.cuda()
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            table_update(
                weights, [state], ids, bags, grad, layout, counts=counts, spec=SPECS[0],
                id_weights_I=id_weights,
            )  # fmt: skip
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_equals_tables_with_their_optimizer(spec):
    torch.manual_seed(1)
    specs = [
        TableSpec(name="a", embedding_dim=4, num_embeddings=7, feature_names=("x", "y")),
        TableSpec(
            name="b", embedding_dim=8, num_embeddings=9, feature_names=("z",), pooling="mean"
        ),
    ]
    tables = EmbeddingTables(specs)
    optimizer = table_optimizer(tables.table_parameters(), spec)
    layout = TableLayout.packed([(7, 4), (9, 8)], [(0, "sum"), (0, "sum"), (1, "mean")])
    flat = torch.cat([p.detach().flatten() for p in tables.table_parameters()])
    states = [state.zero_() for state in states_of(spec, layout)]
    for step in range(1, 4):
        lengths = torch.randint(0, 4, (3, 5))
        parts = [torch.randint(0, 7, (int(n.sum()),)) for n in lengths]
        ids = {k: Jagged.from_lengths(i, n) for k, i, n in zip("xyz", parts, lengths, strict=True)}
        optimizer.zero_grad()
        out = tables(ids)
        grads = {name: torch.randn_like(value) for name, value in out.items()}
        torch.autograd.backward([out[k] for k in "xyz"], [grads[k] for k in "xyz"])
        optimizer.step()
        every = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
        table_update(
            flat, states, torch.cat(parts), every,
            torch.cat([grads[k].flatten() for k in "xyz"]), layout,
            counts=[len(i) for i in parts], spec=spec, step=step,
        )  # fmt: skip
        expected = torch.cat([p.detach().flatten() for p in tables.table_parameters()])
        torch.testing.assert_close(flat, expected)


@pytest.mark.interpreter
@pytest.mark.parametrize("span", [1, 4])
def test_runs_may_lie_anywhere_among_the_borders_of_stretches(span, monkeypatch):
    import gem_embeddings.merging.kernel as merging

    monkeypatch.setattr(merging, "_SPAN", span)
    draw = torch.Generator().manual_seed(0)
    for longest in (2, 6, 20):
        runs = torch.randint(0, longest + 1, (30,), generator=draw)
        ids = torch.arange(30).repeat_interleave(runs)
        ids = ids[torch.randperm(len(ids), generator=draw)]
        layout = TableLayout.packed([(30, 4)], [(0, "none")])
        # Sums of whole numbers are exact, so every order gives the same.
        grad = torch.randint(-9, 10, (len(ids), 4), generator=draw).float()
        weights = torch.zeros(120)
        table_update(
            weights, [], ids, torch.tensor([0, len(ids)]), grad.flatten(), layout,
            counts=[len(ids)], spec=OptimizerSpec(kind="sgd", lr=1.0), impl="triton",
        )  # fmt: skip
        expected = torch.zeros(30, 4).index_add_(0, ids, grad)
        assert torch.equal(-weights.view(30, 4), expected)


@pytest.mark.interpreter
def test_rows_of_16_bits_are_rounded_by_chance_with_equal_bits():
    batch = batch_of((3, 0, 9), shapes=[(7, 40), (9, 60)], dtype=torch.float16)
    options = {"dtype": torch.float16, "seed": 5}
    by_chance = updated(batch, SPECS[0], impl="reference", **options)[0]
    assert torch.equal(updated(batch, SPECS[0], impl="triton", **options)[0], by_chance)
    nearest = updated(batch, SPECS[0], dtype=torch.float16)[0]
    # A value that lies anywhere between its neighbours goes to the farther one in a quarter of all
    # cases; 820 of them scatter by 1.5 %.
    assert abs(float((by_chance != nearest).float().mean()) - 0.25) < 0.06
    exact = rule_by_hand(batch, SPECS[0])[0]
    spacing = torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 11)
    assert bool(((by_chance.double() - exact).abs() <= spacing * 1.001).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_updates_are_not_lost_by_chance(dtype):
    # Each step is a fiftieth of the distance of two neighbours.
    layout = TableLayout.packed([(200, 4)], [(0, "none")])
    ids, bags = torch.arange(200), torch.tensor([0, 200])
    spec = OptimizerSpec(kind="sgd", lr=torch.finfo(dtype).eps / 50)
    moved = []
    for seed in (1, None):
        weights = torch.ones(800, dtype=dtype)
        for step in range(1, 101):
            table_update(
                weights, [], ids, bags, -torch.ones(800), layout, counts=[200], spec=spec,
                step=step, seed=seed,
            )  # fmt: skip
        moved.append(float((weights.double() - 1).mean()) / torch.finfo(dtype).eps)
    assert abs(moved[0] - 2) < 0.2
    assert moved[1] == 0


def test_rows_that_no_id_names_stay():
    weights, ids, bags, id_weights, layout, counts = batch = batch_of(LENGTHS)
    outside = torch.full_like(ids, -1)
    batch = (weights, outside, bags, id_weights, layout, counts)
    for spec in SPECS:
        got = updated(batch, spec, grad=torch.ones_like(grad_of(*batch)))
        for a, b in zip(got, [weights, *states_of(spec, layout)], strict=True):
            assert torch.equal(a, b)
