"""Each of the eight checks accepts a right operator and catches a broken one.

The toy operator is the sum of each sequence's tokens times a gain, with a written backward and a
Triton kernel. ``make_toy`` registers it with any of its parts replaced by a broken one.
"""

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_opkit.cost import Cost, register_flops
from gem_opkit.derivatives import check_autograd
from gem_opkit.dims import check_shapes
from gem_opkit.errors import ConfigError, DtypeError, ShapeError, UnsupportedError
from gem_opkit.impl import resolve_impl
from gem_opkit.testing import (
    LENGTH_CASES,
    CheckFailure,
    LengthCase,
    check_alone_equals_in_batch,
    check_compiles_whole,
    check_interpreted_kernel,
    check_kernel_on_gpu,
    check_ragged_edges,
    check_reference_gradients,
    check_refuses,
    check_registration,
    take_sequences,
)

# ---- the toy operator: out_BD[b] = gain_D * sum of values_TD[t] over the tokens t of b ----------


def sequence_ids(offsets_O: Tensor, total: int) -> Tensor:
    positions = torch.arange(total, device=offsets_O.device, dtype=offsets_O.dtype)
    return torch.searchsorted(offsets_O, positions, right=True) - 1


def toy_reference(values_TD: Tensor, gain_D: Tensor, offsets_O: Tensor) -> Tensor:
    sums_BD = values_TD.new_zeros(offsets_O.shape[0] - 1, values_TD.shape[1])
    rows = sequence_ids(offsets_O, values_TD.shape[0])
    return sums_BD.index_add(0, rows, values_TD) * gain_D


def toy_backward_reference(
    grad_BD: Tensor, values_TD: Tensor, gain_D: Tensor, offsets_O: Tensor
) -> tuple[Tensor, Tensor]:
    grad_TD = grad_BD[sequence_ids(offsets_O, values_TD.shape[0])]
    return grad_TD * gain_D, (grad_TD * values_TD).sum(0)


@triton.jit
def _forward_kernel(
    values_ptr, gain_ptr, offsets_ptr, out_ptr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    b = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    in_d = d < D
    total_d = tl.zeros([BLOCK_D], tl.float32)
    for t in range(tl.load(offsets_ptr + b), tl.load(offsets_ptr + b + 1)):
        total_d += tl.load(values_ptr + t * D + d, mask=in_d, other=0.0).to(tl.float32)
    gain_d = tl.load(gain_ptr + d, mask=in_d, other=0.0).to(tl.float32)
    tl.store(out_ptr + b * D + d, total_d * gain_d, mask=in_d)


@triton.jit
def _backward_kernel(
    grad_ptr,
    values_ptr,
    gain_ptr,
    offsets_ptr,
    grad_values_ptr,
    partial_ptr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    b = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    in_d = d < D
    grad_d = tl.load(grad_ptr + b * D + d, mask=in_d, other=0.0).to(tl.float32)
    gain_d = tl.load(gain_ptr + d, mask=in_d, other=0.0).to(tl.float32)
    total_d = tl.zeros([BLOCK_D], tl.float32)
    for t in range(tl.load(offsets_ptr + b), tl.load(offsets_ptr + b + 1)):
        values_d = tl.load(values_ptr + t * D + d, mask=in_d, other=0.0).to(tl.float32)
        total_d += values_d * grad_d
        tl.store(grad_values_ptr + t * D + d, grad_d * gain_d, mask=in_d)
    tl.store(partial_ptr + b * D + d, total_d, mask=in_d)


def launch_forward(values_TD, gain_D, offsets_O):
    batch, width = offsets_O.shape[0] - 1, values_TD.shape[1]
    out_BD = torch.empty(batch, width, dtype=values_TD.dtype, device=values_TD.device)
    if batch:
        block = triton.next_power_of_2(width)
        _forward_kernel[(batch,)](values_TD, gain_D, offsets_O, out_BD, width, block)
    return out_BD


def launch_backward(grad_BD, values_TD, gain_D, offsets_O):
    batch, width = grad_BD.shape
    grad_values_TD = torch.empty_like(values_TD)
    partial_BD = torch.empty(batch, width, dtype=torch.float32, device=values_TD.device)
    if batch:
        _backward_kernel[(batch,)](
            grad_BD.contiguous(),
            values_TD,
            gain_D,
            offsets_O,
            grad_values_TD,
            partial_BD,
            width,
            triton.next_power_of_2(width),
        )
    return grad_values_TD, partial_BD.sum(0).to(gain_D.dtype)


def forward_cost(tokens: int, batch: int, width: int) -> Cost:
    return Cost(tokens * width + batch * width, 4 * (tokens + batch + 1) * width)


def backward_cost(tokens: int, width: int) -> Cost:
    return Cost(3 * tokens * width, 4 * (3 * tokens + 1) * width)


PARTS = {
    "forward": toy_reference,
    "backward": toy_backward_reference,
    "kernel_forward": launch_forward,
    "kernel_backward": launch_backward,
    "fake": lambda v, g, o: v.new_empty(o.shape[0] - 1, v.shape[1]),
    "flops": lambda v, g, o, impl: forward_cost(v.shape[0], o.shape[0] - 1, v.shape[1]),
    "backward_flops": lambda grad, v, g, o, impl: backward_cost(v.shape[0], v.shape[1]),
    "check": check_shapes,
    "derivatives": check_autograd,
}
made = 0


def make_toy(**replaced):
    """Register the toy operator under a new name, some parts replaced."""
    global made
    made += 1
    part = SimpleNamespace(**{**PARTS, **replaced})
    name = f"gem_toy::sum_{made}"

    @torch.library.custom_op(name, mutates_args=())
    def forward(values_TD: Tensor, gain_D: Tensor, offsets_O: Tensor, impl: str) -> Tensor:
        run = part.kernel_forward if impl == "triton" else part.forward
        return run(values_TD, gain_D, offsets_O)

    @forward.register_fake
    def _(values_TD, gain_D, offsets_O, impl):
        return part.fake(values_TD, gain_D, offsets_O)

    @torch.library.custom_op(f"{name}_backward", mutates_args=())
    def backward(
        grad_BD: Tensor, values_TD: Tensor, gain_D: Tensor, offsets_O: Tensor, impl: str
    ) -> tuple[Tensor, Tensor]:
        run = part.kernel_backward if impl == "triton" else part.backward
        return run(grad_BD, values_TD, gain_D, offsets_O)

    @backward.register_fake
    def _(grad_BD, values_TD, gain_D, offsets_O, impl):
        return torch.empty_like(values_TD), torch.empty_like(gain_D)

    def setup_context(ctx, inputs, output):
        values_TD, gain_D, offsets_O, ctx.impl = inputs
        ctx.save_for_backward(values_TD, gain_D, offsets_O)

    def differentiate(ctx, grad_BD):
        return *backward(grad_BD, *ctx.saved_tensors, ctx.impl), None, None

    forward.register_autograd(differentiate, setup_context=setup_context)
    if part.flops:
        register_flops(forward, part.flops)
        register_flops(backward, part.backward_flops)

    def toy(values_TD, gain_D, offsets_O, *, impl="auto"):
        part.check("toy", values_TD=values_TD, gain_D=gain_D, offsets_O=offsets_O)
        if not values_TD.dtype.is_floating_point:
            raise DtypeError(
                f"toy: values_TD must be floating; got {values_TD.dtype}; cast it to float32"
            )
        part.derivatives("toy", values_TD=values_TD, gain_D=gain_D)
        chosen = resolve_impl(impl, values_TD.device, "toy", has_triton=True)
        return forward(values_TD, gain_D, offsets_O, chosen)

    toy.op = forward
    return toy


good = make_toy()


def inputs_of(case, width=3, dtype=torch.float32):
    return (
        torch.randn(case.total_tokens, width, dtype=dtype, requires_grad=True),
        torch.randn(width, dtype=dtype, requires_grad=True),
        case.offsets_tensor(),
    )


SMALL = LengthCase("small", (2, 0, 3))
COSTS = {"cost": forward_cost(5, 3, 3), "backward_cost": backward_cost(5, 3)}


# ---- 1 reference gradients ----------------------------------------------------------------------


def test_reference_gradients():
    check_reference_gradients(good, inputs_of(SMALL), reference=toy_reference)


def test_reference_gradients_catch_a_wrong_backward():
    def no_gain(grad_BD, values_TD, gain_D, offsets_O):
        grad_TD, grad_D = toy_backward_reference(grad_BD, values_TD, gain_D, offsets_O)
        return grad_TD / gain_D, grad_D

    with pytest.raises(CheckFailure, match="numeric derivative"):
        check_reference_gradients(make_toy(backward=no_gain), inputs_of(SMALL))


def test_reference_gradients_catch_a_slightly_wrong_backward_by_the_reference():
    def off_by_a_millionth(*args):
        grad_TD, grad_D = toy_backward_reference(*args)
        return grad_TD * (1 + 1e-6), grad_D

    toy = make_toy(backward=off_by_a_millionth)
    check_reference_gradients(toy, inputs_of(SMALL))  # numeric derivatives cannot see it
    with pytest.raises(CheckFailure, match="autograd of the reference"):
        check_reference_gradients(toy, inputs_of(SMALL), reference=toy_reference)


def with_layout_read_wrongly(is_awkward):
    """A backward that takes the memory behind a gradient of some layout for dense rows."""

    def backward(grad_BD, values_TD, gain_D, offsets_O):
        if is_awkward(grad_BD):
            stored = grad_BD.new_zeros(grad_BD.numel())  # what follows one stored value: zeros
            known = grad_BD.untyped_storage().nbytes() // grad_BD.element_size()
            stored[:known] = grad_BD.as_strided((known,), (1,))
            grad_BD = stored.view(grad_BD.shape)
        return toy_backward_reference(grad_BD, values_TD, gain_D, offsets_O)

    return backward


@pytest.mark.parametrize("layout", ["expanded", "transposed"])
def test_reference_gradients_catch_a_backward_that_assumes_dense_rows(layout):
    def transposed_or_expanded(grad):
        return not grad.is_contiguous() and (grad.stride(0) == 0) == (layout == "expanded")

    toy = make_toy(backward=with_layout_read_wrongly(transposed_or_expanded))
    with pytest.raises(CheckFailure, match=f"{layout} upstream gradient"):
        check_reference_gradients(toy, inputs_of(SMALL))


def test_reference_gradients_catch_tangents_that_are_dropped():
    toy = make_toy(derivatives=lambda op, **tensors: None)
    with pytest.raises(CheckFailure, match="tangent of an input is dropped in silence"):
        check_reference_gradients(toy, inputs_of(SMALL))
    # What hands tangents on passes, too.
    check_reference_gradients(toy_reference, inputs_of(SMALL))


def test_reference_gradients_need_something_to_differentiate():
    plain = tuple(t.detach() for t in inputs_of(SMALL))
    with pytest.raises(ConfigError, match="requires a gradient"):
        check_reference_gradients(good, plain)


# ---- 2 registration -----------------------------------------------------------------------------


def test_registration():
    check_registration(good.op, (*inputs_of(SMALL), "reference"), **COSTS)


def test_registration_catches_a_fake_of_another_shape():
    toy = make_toy(fake=lambda v, g, o: v.new_empty(o.shape[0], v.shape[1]))
    with pytest.raises(CheckFailure, match="opcheck"):
        check_registration(toy.op, (*inputs_of(SMALL), "reference"), **COSTS)


def test_registration_catches_a_hidden_mutation():
    def mutating(values_TD, gain_D, offsets_O):
        out = toy_reference(values_TD, gain_D, offsets_O)
        values_TD.zero_()
        return out

    with pytest.raises(CheckFailure, match="opcheck"):
        check_registration(make_toy(forward=mutating).op, (*inputs_of(SMALL), "reference"), **COSTS)


def test_registration_catches_a_missing_formula():
    with pytest.raises(CheckFailure, match="no FLOP formula"):
        check_registration(make_toy(flops=None).op, (*inputs_of(SMALL), "reference"), **COSTS)


def test_registration_catches_a_wrong_formula():
    toy = make_toy(flops=lambda v, g, o, impl: 2 * v.numel())
    with pytest.raises(CheckFailure, match=r"formula gives 30, cost\.py 24"):
        check_registration(toy.op, (*inputs_of(SMALL), "reference"), **COSTS)


def test_registration_catches_a_wrong_backward_formula():
    toy = make_toy(backward_flops=lambda grad, v, g, o, impl: 0)
    with pytest.raises(CheckFailure, match=r"backward counts 0 FLOPs, cost\.py 45"):
        check_registration(toy.op, (*inputs_of(SMALL), "reference"), **COSTS)


def test_registration_catches_a_formula_that_reads_a_tensor():
    def from_offsets(v, g, o, impl):
        return int(o[-1]) * v.shape[1] + (o.shape[0] - 1) * v.shape[1]

    with pytest.raises(CheckFailure, match="on fake tensors"):
        check_registration(
            make_toy(flops=from_offsets).op, (*inputs_of(SMALL), "reference"), **COSTS
        )


# ---- 3 compiles whole ---------------------------------------------------------------------------

THREE_LENGTHS = [LengthCase("", lengths) for lengths in ((3, 5), (2, 0, 7), (4, 9, 1, 2))]


def test_compiles_whole():
    check_compiles_whole(good, [inputs_of(case) for case in THREE_LENGTHS])


def test_compiles_whole_takes_a_module_and_its_parameters():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gain_D = torch.nn.Parameter(torch.randn(3))

        def forward(self, values_TD, offsets_O):
            return good(values_TD, self.gain_D, offsets_O)

    sets = [(inputs_of(case)[0], case.offsets_tensor()) for case in THREE_LENGTHS]
    check_compiles_whole(Layer(), sets)


def test_compiles_whole_catches_a_graph_break():
    def breaking(values_TD, gain_D, offsets_O):
        if float(values_TD.detach().sum()) > 1e9:
            return gain_D
        return good(values_TD, gain_D, offsets_O)

    with pytest.raises(CheckFailure, match="not one whole graph"):
        check_compiles_whole(breaking, [inputs_of(case) for case in THREE_LENGTHS])


def test_compiles_whole_catches_a_graph_for_every_length():
    def specialising(values_TD, gain_D, offsets_O):
        rows = [values_TD[i] for i in range(values_TD.shape[0])]  # unrolled: one graph a length
        return good(torch.stack(rows), gain_D, offsets_O)

    with pytest.raises(CheckFailure, match="3 graphs for 3 input sets"):
        check_compiles_whole(specialising, [inputs_of(case) for case in THREE_LENGTHS])


def test_compiles_whole_catches_another_result_under_compile():
    def two_faced(values_TD, gain_D, offsets_O):
        out_BD = good(values_TD, gain_D, offsets_O)
        return out_BD * 1.01 if torch.compiler.is_compiling() else out_BD

    with pytest.raises(CheckFailure, match="input set 0, compiled: output 0: differs"):
        check_compiles_whole(two_faced, [inputs_of(case) for case in THREE_LENGTHS])


def test_compiles_whole_catches_another_gradient_under_compile():
    def two_faced(values_TD, gain_D, offsets_O):
        if torch.compiler.is_compiling():
            values_TD = values_TD.detach() + 0 * values_TD
        return good(values_TD, gain_D, offsets_O)

    with pytest.raises(CheckFailure, match="gradient of input 0: differs"):
        check_compiles_whole(two_faced, [inputs_of(case) for case in THREE_LENGTHS])


# ---- 4 interpreted kernel -----------------------------------------------------------------------

KERNEL_CASE = LengthCase("kernel", (3, 0, 17, 1))


@pytest.mark.interpreter
def test_interpreted_kernel():
    check_interpreted_kernel(good, toy_reference, inputs_of(KERNEL_CASE, width=5))


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("part", "broken", "message"),
    [
        ("kernel_forward", lambda v, g, o: launch_forward(v, g * 1.00001, o), "output 0"),
        (
            "kernel_backward",
            lambda d, v, g, o: launch_backward(d, v, g * 1.00001, o),
            "gradient of input 0",
        ),
        ("kernel_forward", lambda v, g, o: torch.empty_like(launch_forward(v, g, o)), "finite"),
        ("kernel_forward", toy_reference, "launched no Triton kernel forward"),
        ("kernel_backward", toy_backward_reference, "launched no Triton kernel backward"),
        ("kernel_forward", lambda v, g, o: launch_forward(v, g, o)[:2], "shape"),
        ("kernel_forward", lambda v, g, o: launch_forward(v, g, o).half(), "dtype"),
    ],
)
def test_interpreted_kernel_catches(part, broken, message):
    with pytest.raises(CheckFailure, match=message):
        check_interpreted_kernel(
            make_toy(**{part: broken}), toy_reference, inputs_of(KERNEL_CASE, width=5)
        )


@pytest.mark.interpreter
def test_interpreted_kernel_demands_an_exact_reference():
    def in_fp32_inside(values_TD, gain_D, offsets_O):
        return toy_reference(values_TD.float(), gain_D.float(), offsets_O)

    with pytest.raises(CheckFailure, match=r"reference is torch\.float32 for fp64 inputs"):
        check_interpreted_kernel(good, in_fp32_inside, inputs_of(KERNEL_CASE, width=5))


@pytest.mark.interpreter
def test_interpreted_kernel_refuses_bf16_where_the_interpreter_is_wrong():
    with pytest.raises(ConfigError, match="input 0 must be fp32"):
        check_interpreted_kernel(good, toy_reference, inputs_of(SMALL, dtype=torch.bfloat16))


def test_interpreted_kernel_needs_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ConfigError, match="TRITON_INTERPRET must be 1"):
        check_interpreted_kernel(good, toy_reference, inputs_of(SMALL))


# ---- 5 kernel on GPU ----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.memcheck
def test_kernel_on_gpu():
    check_kernel_on_gpu(good, toy_reference, inputs_of(KERNEL_CASE, width=60))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("part", "broken", "message"),
    [
        ("kernel_forward", lambda v, g, o: launch_forward(v, g * 1.00001, o), "float32: output 0"),
        (
            "kernel_backward",
            lambda d, v, g, o: launch_backward(d, v, g * 1.02, o),
            "gradient of input 0",
        ),
        ("kernel_forward", toy_reference, "launched no Triton kernel forward"),
        (
            "kernel_forward",
            lambda v, g, o: launch_forward(v[: int(o[-1])], g, o),
            "synchronised with the device",
        ),
    ],
)
def test_kernel_on_gpu_catches(part, broken, message):
    with pytest.raises(CheckFailure, match=message):
        check_kernel_on_gpu(
            make_toy(**{part: broken}), toy_reference, inputs_of(KERNEL_CASE, width=60)
        )


@pytest.mark.gpu
def test_kernel_on_gpu_holds_bf16_to_its_own_budget():
    def bf16_sum(values_TD, gain_D, offsets_O):  # sums in the input's dtype instead of fp32
        launch_forward(values_TD, gain_D, offsets_O)
        out = torch.zeros(offsets_O.shape[0] - 1, values_TD.shape[1]).to(values_TD)
        for b in range(out.shape[0]):
            for t in range(int(offsets_O[b]), int(offsets_O[b + 1])):
                out[b] = (out[b] + values_TD[t]) * 1.004
        return out * gain_D

    with pytest.raises(CheckFailure, match=r"bfloat16: output 0"):
        check_kernel_on_gpu(
            make_toy(kernel_forward=bf16_sum),
            toy_reference,
            inputs_of(LengthCase("", (40, 3)), width=8),
            dtypes=(torch.bfloat16,),
        )


# ---- 6 ragged edges -----------------------------------------------------------------------------


def test_ragged_edges():
    check_ragged_edges(good, toy_reference, inputs_of)


@pytest.mark.interpreter
def test_ragged_edges_of_the_kernel():
    def kernel(values_TD, gain_D, offsets_O):
        return good(values_TD, gain_D, offsets_O, impl="triton")

    check_ragged_edges(kernel, toy_reference, inputs_of, compiled=False)


def broken_for_empty(values_TD, gain_D, offsets_O):
    """A mean in disguise: 0/0 where a sequence is empty."""
    lengths_B1 = offsets_O.diff().unsqueeze(1)
    return toy_reference(values_TD, gain_D, offsets_O) * lengths_B1 / lengths_B1


def broken_for_batch_of_0(values_TD, gain_D, offsets_O):
    if offsets_O.shape[0] == 1:
        return values_TD.new_zeros(1, values_TD.shape[1])
    return toy_reference(values_TD, gain_D, offsets_O)


def unwritten_for_empty(values_TD, gain_D, offsets_O):
    out_BD = torch.empty(offsets_O.shape[0] - 1, values_TD.shape[1])
    written = offsets_O.diff() > 0
    out_BD[written] = toy_reference(values_TD, gain_D, offsets_O)[written]
    return out_BD


def last_token_lost_when_long(values_TD, gain_D, offsets_O):
    kept = torch.arange(values_TD.shape[0]) < 64
    return toy_reference(values_TD * kept.unsqueeze(1), gain_D, offsets_O)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (broken_for_empty, "first_empty: output 0: .* not finite"),
        (broken_for_batch_of_0, "batch_of_0: output 0: shape"),
        (unwritten_for_empty, "first_empty: output 0: .* not finite"),
        (last_token_lost_when_long, "giant_among_dwarfs: output 0: differs"),
    ],
)
def test_ragged_edges_catch_forward(forward, message):
    with pytest.raises(CheckFailure, match=message):
        check_ragged_edges(make_toy(forward=forward), toy_reference, inputs_of, compiled=False)


def test_ragged_edges_catch_a_backward_wrong_for_one_token():
    def wrong_alone(grad_BD, values_TD, gain_D, offsets_O):
        grad_TD, grad_D = toy_backward_reference(grad_BD, values_TD, gain_D, offsets_O)
        return (grad_TD * 2 if values_TD.shape[0] == 1 else grad_TD), grad_D

    with pytest.raises(CheckFailure, match="one_token: gradient of input 0"):
        check_ragged_edges(make_toy(backward=wrong_alone), toy_reference, inputs_of, compiled=False)


def test_ragged_edges_catch_a_fault_of_the_compiled_form_alone():
    def two_faced(values_TD, gain_D, offsets_O):
        out_BD = good(values_TD, gain_D, offsets_O)
        if torch.compiler.is_compiling() and offsets_O.shape[0] == 1:
            return torch.cat([out_BD, gain_D.unsqueeze(0)])
        return out_BD

    with pytest.raises(CheckFailure, match="batch_of_0, compiled: output 0: shape"):
        check_ragged_edges(two_faced, toy_reference, inputs_of)


def test_length_cases_hold_every_empty_thing():
    lengths = [case.lengths for case in LENGTH_CASES]
    assert () in lengths
    assert any(len(c) > 1 and set(c) == {0} for c in lengths)
    assert any(c and c[0] == 0 and any(c) for c in lengths)
    assert any(c and c[-1] == 0 and any(c) for c in lengths)
    assert (1,) in lengths
    assert all(c for c in lengths[:1]) and all(lengths[0])
    for case in LENGTH_CASES:
        assert case.offsets()[-1] == case.total_tokens == sum(case.lengths)
        assert case.offsets_tensor(dtype=torch.int32).dtype is torch.int32


# ---- 7 alone equals in batch --------------------------------------------------------------------

LENGTHS = (3, 0, 5, 1)


def alone(toy, **options):
    values_TD = torch.randn(9, 3, requires_grad=True)
    gain_D = torch.randn(3, requires_grad=True)

    def make_inputs(picked):
        case = LengthCase("", tuple(LENGTHS[i] for i in picked))
        return take_sequences(values_TD, LENGTHS, picked), gain_D, case.offsets_tensor()

    options = {"leaves": [values_TD, gain_D], "split": "sequences", **options}
    check_alone_equals_in_batch(toy, make_inputs, LENGTHS, **options)


def test_alone_equals_in_batch():
    alone(good)


def test_alone_equals_in_batch_bit_for_bit_in_the_toy():
    alone(good, bitwise=True)


def test_alone_takes_a_function_that_splits():
    alone(good, split=lambda out, lengths: list(out.split([1] * len(lengths))))


def test_alone_catches_sequences_that_see_each_other():
    def leaking(values_TD, gain_D, offsets_O):
        return toy_reference(values_TD, gain_D, offsets_O) + 1e-3 * values_TD.sum()

    with pytest.raises(CheckFailure, match="sequence 0 alone"):
        alone(make_toy(forward=leaking))


def test_alone_catches_a_gradient_that_leaks():
    def leaking(grad_BD, values_TD, gain_D, offsets_O):
        grad_TD, grad_D = toy_backward_reference(grad_BD, values_TD, gain_D, offsets_O)
        return grad_TD + 1e-3 * grad_BD.sum(), grad_D

    with pytest.raises(CheckFailure, match="gradient of leaf 0"):
        alone(make_toy(backward=leaking))


def test_alone_catches_bits_that_depend_on_the_batch():
    def batch_size_in_the_rounding(values_TD, gain_D, offsets_O):
        out_BD = toy_reference(values_TD, gain_D, offsets_O)
        return out_BD * (1 + 2**-23) if out_BD.shape[0] > 1 else out_BD

    toy = make_toy(forward=batch_size_in_the_rounding)
    alone(toy)
    with pytest.raises(CheckFailure, match="not the same bits"):
        alone(toy, bitwise=True)


def test_alone_does_not_pass_over_gradients():
    with pytest.raises(ConfigError, match="leaves must name"):
        alone(good, leaves=[])


def test_alone_splits_packed_tokens():
    values_TD = torch.randn(9, 3, requires_grad=True)

    def check(fn):
        check_alone_equals_in_batch(
            fn,
            lambda picked: (take_sequences(values_TD, LENGTHS, picked),),
            LENGTHS,
            leaves=[values_TD],
        )

    check(lambda x_TD: (x_TD.exp(), x_TD * 2))
    with pytest.raises(CheckFailure, match="sequence 0 alone"):
        check(lambda x_TD: x_TD - x_TD.mean())


# ---- 8 refuses ----------------------------------------------------------------------------------


def toy_refusals(toy):
    values_TD, gain_D, offsets_O = inputs_of(SMALL)
    return [
        (lambda: toy(values_TD, torch.ones(4), offsets_O), ShapeError, "gain_D has D=4"),
        (lambda: toy(values_TD[0], gain_D, offsets_O), ShapeError, r"2 dims \(TD\)"),
        (lambda: toy(values_TD.long(), gain_D, offsets_O), DtypeError, "must be floating"),
        (lambda: toy(values_TD, gain_D, offsets_O, impl="cuda"), UnsupportedError, "'cuda'"),
    ]


def test_refuses():
    check_refuses(toy_refusals(good))


def test_refuses_catches_an_operator_that_accepts():
    broken = make_toy(check=lambda op, **tensors: None, forward=lambda v, g, o: v.new_ones(3, 3))
    with pytest.raises(CheckFailure, match=r"row 0 \(ShapeError, .* was accepted"):
        check_refuses(toy_refusals(broken))


def raising(error):
    def call():
        raise error

    return call


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((raising(TypeError("x: y; z")), ShapeError, "y"), "raised TypeError"),
        ((raising(ShapeError("op: a must b; got c; do d")), ShapeError, "zzz"), "message is"),
        ((raising(ShapeError("invalid input")), ShapeError, "invalid"), "lacks the form"),
        ((raising(ValueError("op: a; b")), ValueError, "a"), "expect a GemError"),
    ],
)
def test_refuses_catches(row, message):
    with pytest.raises(CheckFailure, match=message):
        check_refuses([row])


def test_refuses_needs_rows():
    with pytest.raises(CheckFailure, match="at least one row"):
        check_refuses([])
