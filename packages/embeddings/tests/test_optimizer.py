import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from gem_embeddings.contract import OptimizerSpec, TableSpec
from gem_embeddings.optimizer import (
    Adam,
    RowWiseAdagrad,
    gradient_rows,
    merge_sparse_gradients,
    table_optimizer,
)
from gem_embeddings.tables import EmbeddingTables
from gem_jagged.batch import Jagged
from gem_opkit.errors import ConfigError, ShapeError
from gem_opkit.testing import check_refuses
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks

ROWS = 12
KINDS = ["rowwise_adagrad", "adagrad", "sgd", "adam"]


def batches(steps, *, rows=ROWS, seed=0):
    """Ids of several steps, with repeats within a step, and a weight for each id's gradient."""
    draw = torch.Generator().manual_seed(seed)
    return [
        (torch.randint(0, rows, (9,), generator=draw), torch.randn(9, 4, generator=draw))
        for _ in range(steps)
    ]


def made(kind, *, seed=1, rows=ROWS, width=4, dtype=torch.float32, lr=0.1):
    torch.manual_seed(seed)
    spec = TableSpec(
        name="t", embedding_dim=width, num_embeddings=rows, feature_names=("a",), pooling="none"
    )
    tables = EmbeddingTables([spec]).to(dtype)
    spec = OptimizerSpec(kind=kind, lr=lr, eps=1e-6, beta1=0.8, beta2=0.95)
    return tables, table_optimizer(tables.table_parameters(), spec)


def train(tables, optimizer, steps):
    for ids, upstream in steps:
        optimizer.zero_grad()
        out = tables({"a": Jagged.from_list([ids])})["a"]
        (out * upstream.to(out.dtype)).sum().backward()
        optimizer.step()


def dense_gradients(steps, width=4):
    for ids, upstream in steps:
        grad = torch.zeros(ROWS, width, dtype=torch.float64)
        for row, value in zip(ids.tolist(), upstream.double(), strict=True):
            grad[row] += value
        yield sorted(set(ids.tolist())), grad


def adagrad_oracle(weight, steps, *, lr=0.1, eps=1e-6):
    """The formula of the docstring, row by row, in fp64."""
    weight, state = weight.double().clone(), [0.0] * ROWS
    for seen, grad in dense_gradients(steps):
        for row in seen:
            state[row] += float((grad[row] ** 2).mean())
            weight[row] -= lr * grad[row] / (state[row] ** 0.5 + eps)
    return weight


def elementwise_oracle(weight, steps, *, lr=0.1, eps=1e-6):
    """The formula of the docstring, row by row, in fp64."""
    weight = weight.double().clone()
    state = torch.zeros_like(weight)
    for seen, grad in dense_gradients(steps):
        for row in seen:
            state[row] += grad[row] ** 2
            weight[row] -= lr * grad[row] / (state[row].sqrt() + eps)
    return weight


def sgd_oracle(weight, steps, *, lr=0.1):
    weight = weight.double().clone()
    for _, grad in dense_gradients(steps):
        weight -= lr * grad
    return weight


def adam_oracle(weight, steps, *, lr=0.1, betas=(0.8, 0.95), eps=1e-6):
    """The formula of the docstring, row by row, in fp64."""
    weight = weight.double().clone()
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for t, (seen, grad) in enumerate(dense_gradients(steps), start=1):
        for row in seen:
            first[row] = betas[0] * first[row] + (1 - betas[0]) * grad[row]
            second[row] = betas[1] * second[row] + (1 - betas[1]) * grad[row] ** 2
            mean, square = first[row] / (1 - betas[0] ** t), second[row] / (1 - betas[1] ** t)
            weight[row] -= lr * mean / (square.sqrt() + eps)
    return weight


ORACLES = {
    "rowwise_adagrad": adagrad_oracle,
    "adagrad": elementwise_oracle,
    "sgd": sgd_oracle,
    "adam": adam_oracle,
}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_after_many_steps_are_those_of_the_formula(kind):
    steps = batches(20)
    exact_tables, exact_optimizer = made(kind, dtype=torch.float64)
    expected = ORACLES[kind](exact_tables.weights["t"].detach(), steps)
    train(exact_tables, exact_optimizer, steps)
    torch.testing.assert_close(exact_tables.weights["t"].detach(), expected, rtol=1e-12, atol=1e-13)
    tables, optimizer = made(kind)
    train(tables, optimizer, steps)
    torch.testing.assert_close(tables.weights["t"].detach(), expected.float())


def test_one_step_of_adagrad_by_hand():
    weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    optimizer = RowWiseAdagrad([weight], lr=0.5, eps=1e-12)
    weight.grad = torch.sparse_coo_tensor([[1]], [[3.0, 4.0]], (2, 2))
    optimizer.step()
    # mean(9, 16) = 12.5
    moved = torch.tensor([3.0, 4.0]) - 0.5 * torch.tensor([3.0, 4.0]) / 12.5**0.5
    torch.testing.assert_close(weight.detach(), torch.stack([torch.tensor([1.0, 2.0]), moved]))
    assert optimizer.state[weight]["sum"].tolist() == [0.0, 12.5]


def test_a_moment_scale_divides_the_accumulator():
    weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    spec = OptimizerSpec(kind="rowwise_adagrad", lr=0.5, eps=1e-12, moment_scale=2.0)
    optimizer = table_optimizer([weight], spec)
    weight.grad = torch.sparse_coo_tensor([[1]], [[3.0, 4.0]], (2, 2))
    optimizer.step()
    # The accumulator is 12.5 as without a scale; the step is sqrt(2) times as long.
    moved = torch.tensor([3.0, 4.0]) - 0.5 * torch.tensor([3.0, 4.0]) / 6.25**0.5
    torch.testing.assert_close(weight.detach(), torch.stack([torch.tensor([1.0, 2.0]), moved]))
    assert optimizer.state[weight]["sum"].tolist() == [0.0, 12.5]


def test_adam_is_torchs_where_every_row_is_seen():
    ours, optimizer = made("adam", dtype=torch.float64)
    theirs = nn.Parameter(ours.weights["t"].detach().clone())
    peer = torch.optim.Adam([theirs], lr=0.1, betas=(0.8, 0.95), eps=1e-6)
    for step in range(8):
        ids = torch.cat([torch.arange(ROWS), torch.tensor([step])])
        upstream = torch.randn(ROWS + 1, 4, dtype=torch.float64)
        train(ours, optimizer, [(ids, upstream)])
        peer.zero_grad()
        (theirs[ids] * upstream).sum().backward()
        peer.step()
    torch.testing.assert_close(ours.weights["t"].detach(), theirs.detach(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_only_seen_rows_move(kind):
    tables, optimizer = made(kind)
    before = tables.weights["t"].detach().clone()
    train(tables, optimizer, [(torch.tensor([2, 5, 2]), torch.ones(3, 4))] * 3)
    state_before = copy.deepcopy(optimizer.state_dict())
    moved = (tables.weights["t"] != before).any(dim=1).nonzero().squeeze(1)
    assert moved.tolist() == [2, 5]
    middle = tables.weights["t"].detach().clone()
    train(tables, optimizer, [(torch.tensor([7]), torch.ones(1, 4))])
    assert torch.equal(tables.weights["t"][[2, 5]], middle[[2, 5]])
    for name, value in optimizer.state[tables.weights["t"]].items():
        if name != "step":
            kept = state_before["state"][0][name]
            assert torch.equal(value[[2, 5]], kept[[2, 5]]), name


@pytest.mark.parametrize("kind", KINDS)
def test_repeated_ids_count_once_with_their_sum(kind):
    upstream = torch.randn(3, 4)
    one, optimizer_one = made(kind)
    train(one, optimizer_one, [(torch.tensor([4, 1, 4]), upstream)])
    other, optimizer_other = made(kind)
    summed = torch.stack([upstream[0] + upstream[2], upstream[1]])
    train(other, optimizer_other, [(torch.tensor([4, 1]), summed)])
    torch.testing.assert_close(one.weights["t"], other.weights["t"])


@pytest.mark.parametrize("kind", KINDS)
def test_any_form_of_a_gradient_moves_the_same_rows(kind):
    tables, optimizer = made(kind)
    start = tables.weights["t"].detach().clone()
    ids, upstream = batches(1)[0]
    train(tables, optimizer, [(ids, upstream)])
    grad = torch.sparse_coo_tensor(ids[None], upstream, (ROWS, 4))
    for form in (grad, grad.coalesce(), grad.to_dense()):
        weight = nn.Parameter(start.clone())
        weight.grad = form
        again = type(optimizer)([weight], **optimizer.defaults)
        again.step()
        torch.testing.assert_close(weight, tables.weights["t"])


def test_rows_that_ascend_but_repeat_are_added_up():
    grad = torch.sparse_coo_tensor([[1, 1, 3]], [[1.0], [2.0], [4.0]], (5, 1))
    rows, values = gradient_rows(grad)
    assert rows.tolist() == [1, 3]
    assert values.tolist() == [[3.0], [4.0]]


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_and_no_rows_change_no_weight(kind):
    tables, optimizer = made(kind)
    before = tables.weights["t"].detach().clone()
    optimizer.step()
    assert not optimizer.state
    train(tables, optimizer, [(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4))])
    assert torch.equal(tables.weights["t"], before)


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_at_step_7_equals_unbroken_bit_for_bit(kind, tmp_path):
    steps = batches(15)

    def rate(optimizer, step):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)

    unbroken, optimizer = made(kind)
    for step, batch in enumerate(steps):
        rate(optimizer, step)
        train(unbroken, optimizer, [batch])
    first, optimizer_first = made(kind)
    for step, batch in enumerate(steps[:7]):
        rate(optimizer_first, step)
        train(first, optimizer_first, [batch])
    state = {"tables": first.state_dict(), "optimizer": optimizer_first.state_dict()}
    torch.save(state, tmp_path / "state.pt")
    second, optimizer_second = made(kind, seed=9, lr=0.7)
    state = torch.load(tmp_path / "state.pt")
    second.load_state_dict(state["tables"])
    optimizer_second.load_state_dict(state["optimizer"])
    assert optimizer_second.param_groups[0]["lr"] == 0.1 / 7
    assert int(optimizer_second.state[second.weights["t"]]["step"]) == 7
    for step, batch in enumerate(steps[7:], start=7):
        rate(optimizer_second, step)
        train(second, optimizer_second, [batch])
    assert torch.equal(second.weights["t"], unbroken.weights["t"])
    ends = [o.state_dict()["state"][0] for o in (optimizer, optimizer_second)]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize("kind", KINDS)
def test_distributed_checkpoint_resumes_tables_of_two_widths(kind, tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        tables = EmbeddingTables(
            [
                TableSpec(
                    name=name,
                    embedding_dim=width,
                    num_embeddings=ROWS,
                    feature_names=(name,),
                    pooling="sum",
                )
                for name, width in (("narrow", 8), ("wide", 16))
            ]
        )
        spec = OptimizerSpec(kind=kind, lr=0.1)
        return tables, table_optimizer(tables.table_parameters(), spec)

    def run(tables, optimizer, seeds):
        for seed in seeds:
            draw = torch.Generator().manual_seed(seed)
            ids = Jagged.from_lengths(torch.randint(0, ROWS, (6,), generator=draw), [2, 0, 4])
            optimizer.zero_grad()
            out = tables({"narrow": ids, "wide": ids})
            (out["narrow"].square().sum() + out["wide"].square().sum()).backward()
            optimizer.step()

    unbroken, optimizer = build(0)
    run(unbroken, optimizer, range(8))
    first, optimizer_first = build(0)
    run(first, optimizer_first, range(4))
    state = {
        "tables": first.state_dict(),
        "optimizer": get_optimizer_state_dict(first, optimizer_first),
    }
    save(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    second, optimizer_second = build(5)
    state = {
        "tables": second.state_dict(),
        "optimizer": get_optimizer_state_dict(second, optimizer_second),
    }
    load(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    second.load_state_dict(state["tables"])
    set_optimizer_state_dict(second, optimizer_second, state["optimizer"])
    run(second, optimizer_second, range(4, 8))
    for name in ("narrow", "wide"):
        assert torch.equal(second.weights[name], unbroken.weights[name])


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_run_twice_gives_the_same_bits(kind):
    results = []
    for _ in range(2):
        tables, optimizer = made(kind)
        train(tables, optimizer, batches(10))
        results.append(tables.weights["t"].detach())
    assert torch.equal(*results)


def test_closure_gives_its_loss():
    tables, optimizer = made("adam")
    ids = {"a": Jagged.from_list([torch.tensor([1])])}

    def closure():
        optimizer.zero_grad()
        loss = tables(ids)["a"].square().sum()
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure)) for _ in range(3)]
    assert losses[2] < losses[0]


def test_spec_names_the_optimizer():
    weight = nn.Parameter(torch.zeros(2, 2))
    adam = table_optimizer([weight], OptimizerSpec(kind="adam", lr=0.3, beta1=0.5))
    assert isinstance(adam, Adam)
    assert adam.defaults == {"lr": 0.3, "betas": (0.5, 0.999), "eps": 1e-8}
    adagrad = table_optimizer([weight], OptimizerSpec())
    assert isinstance(adagrad, RowWiseAdagrad)


def test_refuses():
    weight = nn.Parameter(torch.zeros(2, 2))
    check_refuses(
        [
            (
                lambda: RowWiseAdagrad([weight], lr=0.0),
                ConfigError,
                "RowWiseAdagrad: lr must be above 0",
            ),
            (lambda: Adam([weight], lr=float("inf")), ConfigError, "lr must be .* finite; got inf"),
            (
                lambda: RowWiseAdagrad([{"params": [weight], "lr": -1.0}]),
                ConfigError,
                "RowWiseAdagrad: lr must be above 0 and finite; got -1",
            ),
            (
                lambda: gradient_rows(torch.eye(2).to_sparse()),
                ShapeError,
                "grad must have two dims and be dense, or sparse over its rows alone",
            ),
            (lambda: gradient_rows(torch.zeros(3)), ShapeError, "grad must have two dims"),
            (
                lambda: Adam([weight], eps=-1.0),
                ConfigError,
                "Adam: eps must be above 0 and finite; got -1",
            ),
            (
                lambda: Adam([weight], betas=(0.9, 1.0)),
                ConfigError,
                r"betas must be in \[0, 1\); got 1",
            ),
            (
                lambda: merge_sparse_gradients([torch.zeros(3)], World(rank=0, size=2)),
                ShapeError,
                r"params\[0\] must have two dims",
            ),
        ]
    )


# Ranks


def three_tables():
    torch.manual_seed(4)
    return EmbeddingTables(
        [
            TableSpec(
                name=name,
                embedding_dim=width,
                num_embeddings=rows,
                feature_names=(name,),
                pooling="sum",
            )
            for name, width, rows in (("a", 3, 7), ("b", 3, 5), ("c", 2, 6))
        ]
    )


def part(rank):
    """Ids of one rank; rank 1 has no id of table b, rank 2 no example at all."""
    lengths = {0: [2, 0, 1], 1: [1, 3], 2: []}[rank]
    draw = torch.Generator().manual_seed(rank)
    ids = {
        name: Jagged.from_lengths(torch.randint(0, 5, (sum(lengths),), generator=draw), lengths)
        for name in "abc"
    }
    if rank == 1:
        ids["b"] = Jagged.from_lengths(torch.zeros(0, dtype=torch.int64), [0, 0])
    return ids


def weighted_sum(out):
    return sum((value * torch.arange(1.0, value.shape[1] + 1)).sum() for value in out.values())


def train_rank(world, steps):
    return {kind: train_kind(world, kind, steps) for kind in KINDS}


def train_kind(world, kind, steps):
    tables = three_tables()
    optimizer = table_optimizer(tables.table_parameters(), OptimizerSpec(kind=kind, lr=0.1))
    grads: list[torch.Tensor] = []
    for _ in range(steps):
        optimizer.zero_grad()
        if world.rank != 2:  # a rank may also have no gradient at all
            (weighted_sum(tables(part(world.rank))) * world.size).backward()
        merge_sparse_gradients(tables.table_parameters(), world)
        if not grads:  # of the first step: both optimizers are blind to a factor of all gradients
            grads = [p.grad.to_dense() for p in tables.table_parameters()]
        optimizer.step()
    seen = [p.grad._indices()[0].tolist() for p in tables.table_parameters()]
    return [p.detach() for p in tables.table_parameters()], seen, grads


def test_ranks_learn_what_one_process_learns():
    world_size = 3
    results = run_ranks(train_rank, world_size, 3)
    for kind in KINDS:
        tables = three_tables()
        optimizer = table_optimizer(tables.table_parameters(), OptimizerSpec(kind=kind, lr=0.1))
        grads: list[torch.Tensor] = []
        for _ in range(3):
            optimizer.zero_grad()
            for rank in range(world_size):
                weighted_sum(tables(part(rank))).backward()
            if not grads:
                grads = [p.grad.to_dense() for p in tables.table_parameters()]
            optimizer.step()
        for weights, seen, merged in (result[kind] for result in results):
            torch.testing.assert_close(merged, grads)
            assert seen == results[0][kind][1]
            for weight, same, expected in zip(
                weights, results[0][kind][0], tables.table_parameters(), strict=True
            ):
                assert torch.equal(weight, same)
                torch.testing.assert_close(weight, expected.detach())


def test_one_rank_keeps_its_gradient():
    tables = three_tables()
    weighted_sum(tables(part(0))).backward()
    grads = [p.grad for p in tables.table_parameters()]
    merge_sparse_gradients(tables.table_parameters(), World())
    assert all(p.grad is g for p, g in zip(tables.table_parameters(), grads, strict=True))
