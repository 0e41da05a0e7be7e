"""Regions that run again: the same bits, the bytes that the plan says, and what is refused."""

import gc

import pytest
import torch
import torch._functorch.config as functorch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from gem_opkit.errors import ConfigError, UnsupportedError
from gem_parallel.dry_run.fakes import FloatsInName
from gem_parallel.recompute.apply import recompute_by
from gem_parallel.recompute.choose import choose, plan_by_hand, region_plan
from gem_parallel.recompute.profile import Rates
from gem_parallel.recompute.record import record

WIDTH, ROWS, LAYERS = 32, 48, 3
REGIONS = [f"layers.{place}" for place in range(LAYERS)]


class Layer(nn.Module):
    """Products, views, several results of one operator, writing in place, chance."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.back = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x, *, scale):
        q, k, v = self.wide(torch.nn.functional.layer_norm(x, (WIDTH,))).chunk(3, dim=1)
        mixed = torch.softmax(q @ k.T * scale, dim=1) @ v
        most, _ = mixed.max(dim=1, keepdim=True)
        shifted = mixed - most
        shifted.add_(1.0)
        return x + self.dropout(torch.sigmoid(self.back(shifted)) * shifted.tanh())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, scale):
        x = torch.relu(self.first(x))
        for layer in self.layers:
            x = layer(x, scale=scale)
        return self.head(x)


def made(dtype=torch.float64):
    torch.manual_seed(3)
    model = Model().to(dtype)
    return model, torch.randn(ROWS, 8, dtype=dtype), torch.tensor(0.2, dtype=dtype)


def profile_of(model, x, scale, **packing):
    """Of a run in name: nothing is computed."""
    mode = FloatsInName()
    state = dict(model.named_parameters())
    with mode:
        named = Model()
        for name, p in named.named_parameters():
            p.data = mode.from_tensor(state[name].detach())
        given = mode.without_memory((x, scale))
        return record(named, REGIONS, lambda: named(*given), alive=given, **packing)


def step(model, x, scale, handle=None):
    """Loss, gradients, and the bytes that were kept where they are counted."""
    torch.manual_seed(11)  # of dropout
    model.zero_grad()
    kept = None
    if handle is None:
        loss = model(x, scale).square().sum()
    else:
        with handle.counting([*model.parameters(), x, scale]) as count:
            loss = model(x, scale).square().sum()
        kept = count.total
        del count
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}, kept


def test_every_budget_gives_the_same_bits_and_keeps_what_the_plan_says():
    model, x, scale = made()
    profile = profile_of(model, x, scale)
    loss, gradients, _ = step(model, x, scale)
    least = choose(profile, None).least_bytes
    most = profile.unchanged_bytes()
    kinds, kept_ops = set(), set()
    for part in (0.0, 0.3, 0.6, 0.8, 1.0):
        plan = choose(profile, int(least + part * (most - least)))
        handle = recompute_by(model, plan)
        found_loss, found, kept = step(model, x, scale, handle)
        handle.undo()
        assert found_loss == loss
        for name, gradient in gradients.items():
            assert torch.equal(gradient, found[name]), (part, name)
        # The loss keeps its input, which lies behind the model.
        assert kept == plan.kept_bytes + 8 * ROWS
        assert plan.kept_bytes <= plan.peak_bytes <= least + part * (most - least) + 1
        kinds |= {r.kind for r in plan.regions}
        kept_ops |= {name for r in plan.regions for name, _ in r.kept}
    assert kinds == {"keep", "recompute"}
    # Some results are kept in regions that run again, and never one that is written into.
    assert any(".mm" in name for name in kept_ops)
    assert not any("aten.sub" in name or "add_" in name for name in kept_ops)
    assert step(model, x, scale)[0] == loss  # undone


class Drawing(Layer):
    """Draws on the host, as rounding by chance does, and is no dropout."""

    draws_random = True

    def forward(self, x, *, scale):
        return super().forward(x * (1 + int(torch.randint(9, ()))), scale=scale)


def test_a_module_that_says_that_it_draws_draws_the_same_again():
    model, x, scale = made()
    for layer in model.layers:
        layer.__class__, layer.dropout.p = Drawing, 0.0
    loss, gradients, _ = step(model, x, scale)
    after = torch.get_rng_state()
    profile = profile_of(model, x, scale)
    regions = [region_plan(profile, n, kept=()) for n in range(LAYERS)]
    handle = recompute_by(model, plan_by_hand(profile, regions))
    found_loss, found, _ = step(model, x, scale, handle)
    handle.undo()
    assert found_loss == loss
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())
    assert torch.equal(torch.get_rng_state(), after)


def test_results_that_are_kept_are_not_computed_again():
    model, x, scale = made()
    profile = profile_of(model, x, scale)

    def flops(rule):
        regions = [region_plan(profile, i, rule(r)) for i, r in enumerate(profile.regions)]
        handle = recompute_by(model, plan_by_hand(profile, regions))
        loss = model(x, scale).sum()
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        handle.undo()
        return counter.get_total_flops()

    none = flops(lambda region: None)
    products = [2 * ROWS * WIDTH * n for n in (3 * WIDTH, ROWS, ROWS, WIDTH)]
    # The last product of a layer is needed for the gradient of the sigmoid behind it.
    assert flops(lambda region: []) - none == LAYERS * sum(products)
    wide = [c for c in profile.regions[0].calls if c.name == "aten.mm.default"][:1]
    assert wide
    assert flops(lambda region: wide) - none == LAYERS * sum(products[1:])


class Block(nn.Module):
    """Products through a width of its own: what it takes to make a byte again differs by block."""

    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(64, width, bias=False)
        self.middle = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, 64, bias=False)

    def forward(self, x):
        x_up = torch.nn.functional.gelu(self.up(x))
        return x + self.down(torch.nn.functional.gelu(self.middle(x_up)))


def test_never_worse_than_torchs_one_budget_for_all_regions_at_equal_memory():
    """Work that is done again, beside torch.compile with one budget for every region."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(width) for width in (32, 512, 64, 256))).double()
    x = torch.randn(256, 64, dtype=torch.float64)
    names = [name for name, _ in blocks.named_children()]
    profile = record(blocks, names, lambda: blocks(x), alive=[x])
    # No time for a start, as operators are small here: work alone counts.
    rates = Rates(flops_per_s=1e11, bytes_per_s=1e12, call_ms=0.0)
    again = []
    for budget in (0.6, 0.4, 0.1):
        torch._dynamo.reset()
        with functorch.patch(activation_memory_budget=budget):
            run = [torch.compile(b, backend="aot_eager_decomp_partition") for b in blocks]
            held, theirs = kept_and_backward_flops(nn.Sequential(*run), x)
        plan = choose(profile, held, rates=rates, bound="kept")
        handle = recompute_by(blocks, plan)
        with handle.counting([*blocks.parameters(), x]) as count:
            loss = blocks(x).sum()
        assert count.total == plan.kept_bytes <= held
        del count
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        handle.undo()
        assert counter.get_total_flops() <= theirs, budget
        again.append(theirs)
    assert again[0] < again[1] < again[2]  # they do make something again


def kept_and_backward_flops(model, x):
    """Bytes that autograd keeps of a forward pass, weights and input aside; FLOPs behind it."""
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes(), t
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        loss = model(x).sum()
    for known in (*model.parameters(), x):
        kept.pop(known.untyped_storage().data_ptr(), None)
    held = sum(size for size, _ in kept.values())
    kept.clear()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    return held, counter.get_total_flops()


class HalfWidth:
    """Keeps bf16 of fp32: a packing whose error is known."""

    def __init__(self):
        self.packed = []

    def bytes_of(self, elements):
        return 2 * elements

    def pack(self, x_TD):
        assert x_TD.is_contiguous()
        self.packed.append(x_TD.untyped_storage().nbytes())
        return (x_TD.bfloat16(),)

    def unpack(self, packed, dtype):
        return packed[0].to(dtype)


@pytest.mark.parametrize("part", [0.4, None])
def test_packed_activations_are_kept_once_and_bound_the_error_of_gradients(part):
    model, x, scale = made(torch.float32)
    exact = step(model, x, scale)[1]
    packing = HalfWidth()
    profile = profile_of(model, x, scale, packing=packing, pack_above_bytes=1)
    least, most = choose(profile, None).least_bytes, profile.unchanged_bytes()
    budget = None if part is None else int(least + part * (most - least))
    plan = choose(profile, budget)
    handle = recompute_by(model, plan, packing=packing, pack_above_bytes=1)
    loss, gradients, kept = step(model, x, scale, handle)
    assert loss == step(model, x, scale)[0] or part is None  # the forward pass is exact
    assert kept == plan.kept_bytes + 4 * ROWS
    packed = profile.size(plan.packed)
    assert sum(packing.packed[: len(plan.packed)]) == packed
    assert profile.packed_size(plan.packed) * 2 == packed > 0.5 * plan.kept_bytes
    for name, gradient in exact.items():
        error = (gradients[name] - gradient).norm() / gradient.norm()
        # A bf16 number is off by 2^-9 at most; a gradient is a sum over a few such factors.
        assert error < 8 * 2.0**-9, (name, error)
    if part is None:
        assert any(not torch.equal(exact[n], g) for n, g in gradients.items())
    # No weight is packed: its gradient would not be its own.
    weights = {p.untyped_storage().nbytes() for p in model.parameters()}
    assert 4 * WIDTH * WIDTH in weights
    assert 4 * 3 * WIDTH * WIDTH not in packing.packed


@pytest.mark.parametrize("packing", [None, HalfWidth()])
def test_nothing_waits_for_the_garbage_collector(packing):
    """Memory of a GPU is gone long before the collector runs."""
    model, x, scale = made(torch.float32)
    profile = profile_of(model, x, scale, packing=packing, pack_above_bytes=1)
    mm = [c for c in profile.regions[0].calls if c.can_be_kept]
    regions = [region_plan(profile, i, mm if i else None) for i in range(LAYERS)]
    plan = plan_by_hand(profile, regions)
    handle = recompute_by(model, plan, packing=packing, pack_above_bytes=1)
    step(model, x, scale, handle)
    gc.collect()
    gc.disable()
    try:
        before = tensors_there()
        step(model, x, scale)
        step(model, x, scale, handle)
        with handle.counting([x]):
            model(x, scale)  # without a backward pass
        assert tensors_there() <= before
    finally:
        gc.enable()
    handle.undo()


def tensors_there():
    return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())


def test_a_second_run_reads_the_weights_of_the_first():
    model, x, scale = made()
    profile = profile_of(model, x, scale)
    mm = [c for c in profile.regions[0].calls if c.name == "aten.mm.default"][:1]
    plan = plan_by_hand(profile, [region_plan(profile, i, mm) for i in range(LAYERS)])
    stand_ins = {
        n: (2 * p).detach().requires_grad_() for n, p in model.named_parameters() if "layers" in n
    }

    def gradients():
        torch.manual_seed(11)
        torch.func.functional_call(model, stand_ins, (x, scale)).sum().backward()
        found = [p.grad for p in stand_ins.values()]
        for p in stand_ins.values():
            p.grad = None
        return found

    expected = gradients()
    handle = recompute_by(model, plan)
    for found, wanted in zip(gradients(), expected, strict=True):
        assert torch.equal(found, wanted)
    handle.undo()


def test_evaluation_runs_as_before():
    model, x, scale = made()
    profile = profile_of(model, x, scale)
    model.eval()
    with torch.no_grad():
        expected = model(x, scale)
        handle = recompute_by(model, choose(profile, choose(profile, None).least_bytes))
        assert torch.equal(model(x, scale), expected)
    handle.undo()


def test_a_second_backward_pass_is_refused_by_name():
    model, x, scale = made()
    profile = profile_of(model, x, scale)
    mm = [c for c in profile.regions[0].calls if c.name == "aten.mm.default"][:1]
    plan = plan_by_hand(profile, [region_plan(profile, i, mm) for i in range(LAYERS)])
    handle = recompute_by(model, plan)
    loss = model(x, scale).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(UnsupportedError, match=r"aten\.mm\.default must be called in the second"):
        loss.backward()
    handle.undo()


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        (["layers.0", "layers.0.wide"], r"got 'layers\.0\.wide' within 'layers\.0'"),
        (
            ["layers.7"],
            r"regions must name parts of the model, none within another; got 'layers\.7'",
        ),
    ],
)
def test_regions_that_are_not_there_or_nested_are_refused(regions, message):
    model, x, scale = made()
    with pytest.raises(ConfigError, match=message):
        record(model, regions, lambda: model(x, scale))


def test_a_region_that_runs_twice_is_refused():
    part = nn.Linear(4, 4)
    model = nn.ModuleDict({"part": part})
    with pytest.raises(ConfigError, match=r"'part', which runs again"):
        record(model, ["part"], lambda: part(part(torch.randn(2, 4))))
