import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gem_opkit.compile_checks import KernelVariant, compile_kernels
from gem_opkit.errors import ConfigError, DtypeError, ShapeError, UnsupportedError
from gem_opkit.testing import check_refuses
from gem_precision.costs import adam_update_cost
from gem_precision.kernels.adam_update.cases import CASES
from gem_precision.ops import adam_update

RATES, DECAYS = (0.05, 0.01, 0.02, 0.0), (0.1, 0.0, 0.5, 0.0)
NUMBERS = {"beta1": 0.8, "beta2": 0.99, "eps": 1e-6}


def weights_of(shapes, *, half=False, dtype=torch.float32, device="cpu"):
    """Weights, gradients, moments and steps, drawn alike on every device."""
    draw = torch.Generator().manual_seed(0)

    def tensors(of=torch.randn):
        return [of(shape, generator=draw).to(device=device, dtype=dtype) for shape in shapes]

    weights, gradients, means, squares = tensors(), tensors(), tensors(), tensors(torch.rand)
    if half:
        gradients = [g.bfloat16() for g in gradients]
    steps = [torch.tensor(float(1 + i), device=device) for i in range(len(shapes))]
    return weights, gradients, means, squares, steps


def updated(shapes, *, half=False, factor=None, impl="auto", device="cpu", dtype=torch.float32):
    """Weights, moments and copies after one update."""
    weights, gradients, means, squares, steps = weights_of(
        shapes, half=half, dtype=dtype, device=device
    )
    copies = [torch.empty_like(w, dtype=torch.bfloat16) for w in weights] if half else []
    count = len(shapes)
    adam_update(
        weights, gradients, means, squares, steps, rates=RATES[:count], decays=DECAYS[:count],
        factor=None if factor is None else torch.tensor(factor, device=device), copies=copies,
        impl=impl, **NUMBERS,
    )  # fmt: skip
    return [[t.cpu() for t in each] for each in (weights, means, squares, copies)]


def by_torch(shapes, *, half=False, factor=1.0):
    """The same by torch's own optimizer, in fp64; one for each tensor, as each has its step."""
    found = [[], [], []]
    weights, gradients, means, squares, steps = weights_of(shapes, half=half)
    for i, weight in enumerate(weights):
        parameter = torch.nn.Parameter(weight.double())
        optimizer = torch.optim.AdamW(
            [parameter], lr=RATES[i], betas=(NUMBERS["beta1"], NUMBERS["beta2"]),
            eps=NUMBERS["eps"], weight_decay=DECAYS[i],
        )  # fmt: skip
        state = {
            "step": steps[i] - 1,
            "exp_avg": means[i].double(),
            "exp_avg_sq": squares[i].double(),
        }
        optimizer.state[parameter] = state
        parameter.grad = gradients[i].double() * factor
        optimizer.step()
        for into, value in zip(
            found, (parameter.detach(), state["exp_avg"], state["exp_avg_sq"]), strict=True
        ):
            into.append(value)
    return found


def check_close(got, expected, *, rtol, atol):
    for name, tensors, wanted in zip(("weights", "means", "squares"), got, expected, strict=False):
        for tensor, value in zip(tensors, wanted, strict=True):
            torch.testing.assert_close(
                tensor.double(),
                value,
                rtol=rtol,
                atol=atol,
                msg=lambda text, n=name: f"{n}: {text}",
            )


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("factor", [None, 0.3])
def test_reference_gradients(half, factor):
    """The reference moves weights as torch's optimizer does in fp64."""
    (case,) = (c for c in CASES if c.device == "cpu" and c.half == half)
    got = updated(case.shapes, half=half, factor=factor, dtype=torch.float64)
    # The factor is a number of fp32.
    exact = by_torch(case.shapes, half=half, factor=float(torch.tensor(factor or 1.0)))
    check_close(got, exact, rtol=1e-12, atol=1e-14)
    for weight, copy in zip(got[0], got[3], strict=half):
        assert torch.equal(weight.bfloat16(), copy)


def test_registration():
    shapes = ((4, 3), (5,))
    weights, gradients, means, squares, steps = weights_of(shapes)
    torch.library.opcheck(
        torch.ops.gem_precision.adam_update.default,
        (weights, gradients, means, squares, steps, [], None, [0.1, 0.1], [0.0, 0.0], 0.9, 0.99,
         1e-8, "reference"),
    )  # fmt: skip
    with FlopCounterMode(display=False) as counter:
        adam_update(
            weights, gradients, means, squares, steps, rates=[0.1] * 2, decays=[0.0] * 2, **NUMBERS
        )
    assert counter.get_total_flops() == adam_update_cost(elements=17).flops == 0
    halves = adam_update_cost(elements=17, gradient_bytes=2, copied=True)
    assert halves.bytes == adam_update_cost(elements=17).bytes


def test_compiles_whole():
    def moved(*tensors):
        given = [[*pair] for pair in zip(*[iter(tensors)] * 2, strict=True)]
        adam_update(*given, rates=RATES[:2], decays=DECAYS[:2], **NUMBERS)
        return given[0]

    whole = torch.compile(moved, fullgraph=True, backend="aot_eager")
    runs = []
    for call in (moved, whole):
        weights = weights_of(((4, 3), (5,)))
        runs.append(call(*(t for each in weights for t in each)))
    for eager, compiled in zip(*runs, strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.interpreter
@pytest.mark.parametrize("factor", [None, 0.3])
def test_interpreted_kernel(factor, monkeypatch):
    import gem_precision.kernels.adam_update.kernel as kernel

    # Whole chunks, a broken one and a tensor smaller than a block.
    monkeypatch.setattr(kernel, "_CHUNK", 256)
    monkeypatch.setattr(kernel, "_BLOCK", 128)
    monkeypatch.setattr(kernel, "_TAIL", 32)
    kernel._chunks.cache_clear()
    shapes = ((40, 15), (7,), (0, 3), ())
    got = updated(shapes, factor=factor, impl="triton")
    kernel._chunks.cache_clear()
    check_close(got, by_torch(shapes, factor=factor or 1.0), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("factor", [None, 0.3])
def test_kernel_on_gpu(half, factor):
    shapes = ((300, 511), (70_001,), (3, 1), ())
    got = updated(shapes, half=half, factor=factor, device="cuda")
    check_close(got, by_torch(shapes, half=half, factor=factor or 1.0), rtol=1e-5, atol=1e-6)
    for weight, copy in zip(got[0], got[3], strict=half):
        assert torch.equal(weight.bfloat16(), copy)
    again = updated(shapes, half=half, factor=factor, device="cuda")
    assert all(torch.equal(a, b) for a, b in zip(got[0], again[0], strict=True))


def test_ragged_edges():
    adam_update([], [], [], [], [], rates=[], decays=[], **NUMBERS)
    weights = weights_of(((0, 4),))
    adam_update(*weights, rates=[0.1], decays=[0.0], **NUMBERS)
    assert weights[0][0].shape == (0, 4)


def test_alone_equals_in_batch():
    shapes = ((40, 8), (7,), (33, 3))
    together = updated(shapes)
    weights, gradients, means, squares, steps = weights_of(shapes)
    for i, weight in enumerate(weights):
        adam_update(
            [weight], [gradients[i]], [means[i]], [squares[i]], [steps[i]], rates=[RATES[i]],
            decays=[DECAYS[i]], **NUMBERS,
        )  # fmt: skip
        assert torch.equal(weight, together[0][i])


def test_refuses():
    weights, gradients, means, squares, steps = weights_of(((4, 3), (5,)))

    def call(rates=(0.1, 0.1), **changed):
        given = {
            "weights": weights,
            "gradients": gradients,
            "means": means,
            "squares": squares,
            "steps": steps,
        }
        given |= {n: v for n, v in changed.items() if n in given}
        rest = {n: v for n, v in changed.items() if n not in given}
        adam_update(*given.values(), rates=rates, decays=(0.0, 0.0), **{**NUMBERS, **rest})

    check_refuses(
        [
            (lambda: call(beta1=1.0), ConfigError, "beta1 must be at least 0"),
            (lambda: call(eps=-1.0), ConfigError, "eps must be at least 0"),
            (lambda: call(rates=(0.1,)), ShapeError, "rates must have one entry for each of 2"),
            (lambda: call(means=means[::-1]), ShapeError, r"means\[0\] must have the shape"),
            (
                lambda: call(gradients=[g.half() for g in gradients]),
                DtypeError,
                r"gradients\[0\] must be float32 or bfloat16",
            ),
            (lambda: call(copies=weights), DtypeError, r"copies\[0\] must be bfloat16"),
            (
                lambda: call(weights=[weights[0].t().contiguous().t(), weights[1]]),
                UnsupportedError,
                r"weights\[0\] must be contiguous",
            ),
            (lambda: call(impl="fast"), UnsupportedError, "impl must be one of"),
        ]
    )


@pytest.mark.gpu
@pytest.mark.memcheck
def test_right_at_odd_addresses():
    weights, gradients, means, squares, steps = weights_of(((33, 5), (7,)), device="cuda")
    shifted = []
    for each in (weights, gradients, means, squares):
        buffer = torch.zeros(1 + sum(t.numel() for t in each), device="cuda")
        at, views = 1, []
        for t in each:
            views.append(buffer[at : at + t.numel()].view(t.shape).copy_(t))
            at += t.numel()
        shifted.append(views)
    adam_update(*shifted, steps, rates=RATES[:2], decays=DECAYS[:2], **NUMBERS)
    expected = by_torch(((33, 5), (7,)))
    check_close([[t.cpu() for t in shifted[i]] for i in (0, 2, 3)], expected, rtol=1e-5, atol=1e-6)


def test_no_decay_in_the_mean_and_none_of_it():
    """A beta of 0 keeps nothing of the moments; a factor of 0 moves by what is kept."""
    weights, gradients, means, squares, steps = weights_of(((6,),))
    before = weights[0].clone()
    adam_update(
        weights, gradients, means, squares, steps, rates=[0.1], decays=[0.0], beta1=0.0, beta2=0.0,
        eps=0.0,
    )  # fmt: skip
    assert torch.equal(means[0], gradients[0])
    torch.testing.assert_close(weights[0], before - 0.1 * gradients[0].sign())


@pytest.mark.interpreter
def test_kernels_compile_to_wide_loads_without_spills():
    numbers = dict.fromkeys(("beta1", "rest1", "beta2", "rest2", "eps"), "fp32")
    pointers = {"table_ptr": "*i64", "scalars_ptr": "*fp32", "chunks_ptr": "*i64"}
    pointers |= {"factor_ptr": "*fp32"}
    move = KernelVariant(
        "_adam_kernel",
        {**pointers, **numbers},
        {"FACTOR": True, "HALF": True, "COPY": True, "ALIGNED": True, "CHUNK": 4096,
         "BLOCK": 1024, "TAIL": 128},
        aligned=list(pointers),
    )  # fmt: skip
    given = {"table_ptr": "*i64", "rates_ptr": "*fp64", "log_beta_ptr": "*fp64"}
    given |= {"scalars_ptr": "*fp32"}
    before = KernelVariant("_scalars_kernel", given, {}, warps=1)
    for done in compile_kernels("gem_precision.kernels.adam_update.kernel", [move, before]):
        assert done.stack_bytes == 0
        if done.variant == move:
            assert done.ptx.count("ld.global.v4.b32") >= 6
            assert done.registers <= 80  # at least six programs on a multiprocessor
