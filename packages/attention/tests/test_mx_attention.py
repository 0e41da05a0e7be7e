"""Attention in MXFP8 against the same mathematics in fp64, one sequence and head at a time.

The oracle rounds with ``mx_quantize``, which has byte tests of its own, and multiplies in fp64. An
element near the middle of two codes may fall to either side where fp32 and fp64 differ in the last
bit; so a result may differ from the oracle by a twentieth of what rounding to 8 bits changes, where
another block, another orientation or a factor left in bf16 would change about all of it.
"""

import math

import pytest
import torch

from gem_attention.kernels.mx_attention.cases import CASES
from gem_attention.kernels.mx_attention.cost import mx_attention_backward_cost, mx_attention_cost
from gem_attention.kernels.mx_attention.op import demand_native
from gem_attention.ops import jagged_flash_attention, mx_attention, mx_attention_way
from gem_attention.patterns import visible_pairs, window_mask
from gem_jagged.batch import Layout
from gem_opkit.compile_checks import KernelVariant, compile_kernels
from gem_opkit.errors import ConfigError, DeviceError, DtypeError, ShapeError, UnsupportedError
from gem_opkit.testing import (
    check_compiles_whole,
    check_refuses,
    check_registration,
    count_launches,
    poisoned_empty,
)
from gem_precision.ops import mx_dequantize, mx_quantize

anywhere = pytest.mark.parametrize(
    ("impl", "device"),
    [
        ("reference", "cpu"),
        pytest.param("triton", "cpu", marks=pytest.mark.interpreter),
        pytest.param("triton", "cuda", marks=pytest.mark.gpu),
    ],
)
MIXED = ((70, 0, 37, 5), (41, 3, 90, 5))
WINDOWS = [(None, None), (None, 0), (5, 20)]


def inputs(q_lengths, k_lengths=None, *, heads=2, kv_heads=2, width=32, value_width=None, tail=0):
    """Queries, keys, values and the gradient of the output; packed, ``tail`` rows behind them."""
    k_lengths = q_lengths if k_lengths is None else k_lengths
    draw = torch.Generator().manual_seed(0)
    q_rows, k_rows = sum(q_lengths) + tail, sum(k_lengths) + tail
    value_width = value_width or width
    shapes = (
        (q_rows, heads, width),
        (k_rows, kv_heads, width),
        (k_rows, kv_heads, value_width),
        (q_rows, heads, value_width),
    )
    return [torch.randn(shape, generator=draw) for shape in shapes]


def run(given, lengths, *, attend=mx_attention, device="cpu", **options):
    """Output and the three gradients, on the CPU."""
    q, k, v = (x.to(device).detach().requires_grad_() for x in given[:3])
    layouts = [Layout.from_lengths(side, device=device) for side in lengths]
    out = attend(q, k, v, *layouts, **options)
    gradients = torch.autograd.grad(out, (q, k, v), given[3].to(device))
    return [x.detach().cpu() for x in (out, *gradients)]


def plain(given, lengths, **options):
    """Attention without rounding, fp64."""
    wide = [x.double() for x in given]
    return run(wide, lengths, attend=jagged_flash_attention, impl="reference", **options)


def rounded(x, scaling):
    """The numbers of MXFP8 in blocks along the last dim, fp64."""
    if x.numel() == 0:
        return x.double()
    matrix = mx_quantize(x.reshape(-1, x.shape[-1]).float(), scaling=scaling)
    return mx_dequantize(matrix).double().view(x.shape)


def oracle(given, lengths, *, window=(None, None), scaling="mxfp8_rceil"):
    """Output and gradients in fp64, one sequence and head after the other."""
    q, k, v, grad_out = given
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    scale = q.shape[2] ** -0.5
    made = [torch.zeros(x.shape, dtype=torch.float64) for x in (grad_out, q, k, v)]
    q0 = k0 = 0
    for q_tokens, k_tokens in zip(*lengths, strict=True):
        at_q, at_k = slice(q0, q0 + q_tokens), slice(k0, k0 + k_tokens)
        q0, k0 = at_q.stop, at_k.stop
        hidden = ~window_mask(q_tokens, k_tokens, *window)
        for h in range(heads if q_tokens and k_tokens else 0):
            g = h // group
            q_i, k_i, v_i = q[at_q, h], k[at_k, g], v[at_k, g]
            grad = grad_out[at_q, h]

            def q_of(x):
                return rounded(x, scaling)

            score = (q_of(q_i) @ q_of(k_i).T * scale).masked_fill(hidden, -math.inf)
            in_twos = score / math.log(2.0)
            top = in_twos.amax(1, keepdim=True).ceil()
            weight = torch.where(hidden, 0.0, torch.exp2(in_twos - top))
            total = weight.sum(1, keepdim=True)
            none = total == 0
            out = torch.where(none, 0.0, q_of(weight) @ q_of(v_i.T).T / total)
            p = torch.where(hidden | none, 0.0, weight / total)
            grad_p = q_of(grad) @ q_of(v_i).T
            grad_s = p * (grad_p - (grad * out.to(q.dtype)).double().sum(1, keepdim=True))
            made[0][at_q, h] = out
            made[1][at_q, h] = scale * q_of(grad_s) @ q_of(k_i.T).T
            made[2][at_k, g] += scale * q_of(grad_s.T) @ q_of(q_i.T).T
            made[3][at_k, g] += q_of(p.T) @ q_of(grad.T).T
    return made


def check_near(found, expected, exact, share=0.05):
    """Hold a result to another, within a share of what rounding to 8 bits changed."""
    names = ("out", "grad_q", "grad_k", "grad_v")
    for name, got, right, true in zip(names, found, expected, exact, strict=True):
        assert bool(got.isfinite().all()), name
        changed = float((right.double() - true).norm())
        # Beside it the roundings of the dtype, which a small change may be lost in.
        of_dtype = torch.finfo(got.dtype).eps * float(true.norm())
        assert float((got.double() - right.double()).norm()) <= share * changed + of_dtype, name


def test_reference_gradients():
    """Where no rounding changes anything the gradients are those of attention itself.

    Keys are 0, so that the four of a sequence have a probability of 1/4 each; values and upstream
    gradients are 1 or -1, so that every factor of every product is a whole number of up to
    three bits over a power of two.
    """
    draw = torch.Generator().manual_seed(0)
    lengths = ((40, 3), (4, 4))
    q = torch.randint(-7, 8, (43, 2, 32), generator=draw).float()
    k = torch.zeros(8, 2, 32)
    v, grad = (torch.randint(0, 2, (n, 2, 1), generator=draw) * 2.0 - 1.0 for n in (8, 43))
    given = [q, k, v, grad]
    found = run(given, lengths, scale=0.5, impl="reference")
    exact = plain(given, lengths, scale=0.5)
    assert float(exact[2].abs().max()) > 1
    for got, right in zip(found, exact, strict=True):
        assert torch.equal(got.double(), right)


def test_registration():
    q, k, v, grad = inputs((3, 0, 4), (2, 2, 6), heads=4, kv_heads=2)
    layouts = [Layout.from_lengths(side) for side in ((3, 0, 4), (2, 2, 6))]
    pairs = visible_pairs(layouts[0].lengths, layouts[1].lengths, 1, 2)
    size = {
        "visible_pairs": pairs, "q_tokens": 7, "k_tokens": 10, "heads": 4, "kv_heads": 2,
        "head_width": 32, "value_width": 32, "element_bytes": 4,
    }  # fmt: skip
    rest = (
        *(layout.offsets_O for layout in layouts),
        *(layout.lengths for layout in layouts),
        *(1, 2, 0.5, "mxfp8_rceil", 3, pairs, "reference"),
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    check_registration(
        torch.ops.gem_attention.mx_attention,
        (*leaves, *rest),
        cost=mx_attention_cost(**size),
        backward_cost=mx_attention_backward_cost(**size),
    )
    q, k, v = (x.detach() for x in leaves)
    out, lse2 = torch.ops.gem_attention.mx_attention(q, k, v, *rest)
    check_registration(
        torch.ops.gem_attention.mx_attention_backward,
        (grad, q, k, v, out, lse2, *rest),
        cost=mx_attention_backward_cost(**size),
    )


def test_compiles_whole():
    def call(q, k, v, layout, k_layout, pairs):
        return mx_attention(q, k, v, layout, k_layout, window=(1, 2), visible_pairs=pairs)

    def made(q_lengths, k_lengths):
        q, k, v, _ = inputs(q_lengths, k_lengths)
        layouts = [Layout.from_lengths(side) for side in (q_lengths, k_lengths)]
        pairs = visible_pairs(layouts[0].lengths, layouts[1].lengths, 1, 2)
        return *(x.requires_grad_() for x in (q, k, v)), *layouts, pairs

    check_compiles_whole(call, [made((3, 0, 5), (2, 4, 3)), made((2, 7, 2), (9, 3, 4))])


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("window", "options"),
    [((5, 20), {}), ((None, None), {"seed": 3, "hadamard_seed": 4})],
    ids=["window", "by_chance_and_rotated"],
)
def test_interpreted_kernel(window, options):
    given = inputs(*MIXED, heads=2, kv_heads=1, value_width=64, tail=2)
    with poisoned_empty("all"), count_launches() as launches:
        found = run(given, MIXED, window=window, impl="triton", **options)
    assert launches.count > 7
    reference = run(given, MIXED, window=window, impl="reference", **options)
    check_near(found, reference, plain(given, MIXED, window=window), share=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("window", "width", "dtype", "options"),
    [
        ((None, None), 128, torch.bfloat16, {}),
        ((None, 0), 64, torch.bfloat16, {"seed": 3}),
        ((5, 20), 64, torch.float32, {"hadamard_seed": 4}),
        ((None, None), 24, torch.float16, {}),
        ((5, 20), 128, torch.bfloat16, {}),
    ],
)
def test_kernel_on_gpu(window, width, dtype, options):
    lengths = ((300, 129, 0, 37, 1, 513), (257, 300, 3, 64, 0, 513))
    given = [x.to(dtype) for x in inputs(*lengths, heads=4, kv_heads=2, width=width, tail=3)]
    with poisoned_empty("all"):
        found = run(given, lengths, window=window, impl="triton", device="cuda", **options)
    reference = run(given, lengths, window=window, impl="reference", **options)
    check_near(found, reference, plain(given, lengths, window=window))


@anywhere
def test_ragged_edges(impl, device):
    """Empty batch, empty sequences on either side, one token, a giant among dwarfs, odd widths."""
    for lengths, width in (
        (((), ()), 32),
        (((0, 0), (0, 0)), 32),
        (((1, 0, 1), (1, 2, 0)), 7),
        (((1, 2, 66, 0), (1, 2, 66, 0)), 40),
    ):
        given = inputs(*lengths, width=width, tail=1)
        with poisoned_empty("all"):
            found = run(given, lengths, impl=impl, device=device)
        exact = plain(given, lengths)
        # Of a row that sees one key D is that of dO, dP that of Q(dO): dS is near 0, not 0.
        for got, right in ((found[0], exact[0]), (found[3], exact[3])):
            assert bool((got[right == 0] == 0).all())
        check_near(found, oracle(given, lengths), exact)


@anywhere
def test_alone_equals_in_batch(impl, device):
    """To the bit: blocks begin where a sequence begins, whatever stands before it."""
    lengths, window = ((3, 0, 40), (5, 2, 33)), (20, 9)
    given = inputs(*lengths)
    whole = run(given, lengths, window=window, impl=impl, device=device)
    parts = [[] for _ in whole]
    q0 = k0 = 0
    for q_tokens, k_tokens in zip(*lengths, strict=True):
        at = (slice(q0, q0 + q_tokens), slice(k0, k0 + k_tokens))
        q0, k0 = at[0].stop, at[1].stop
        alone = [given[0][at[0]], given[1][at[1]], given[2][at[1]], given[3][at[0]]]
        made = run(alone, ([q_tokens], [k_tokens]), window=window, impl=impl, device=device)
        for into, piece in zip(parts, made, strict=True):
            into.append(piece)
    for got, pieces in zip(whole, parts, strict=True):
        if impl == "triton":
            assert torch.equal(got, torch.cat(pieces))
        else:  # padded to another length, sums of a CPU have another order
            assert float((got - torch.cat(pieces)).norm()) <= 2e-3 * float(got.norm())


def test_refuses(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q, k, v, _ = inputs((3, 0, 4), (2, 2, 6))
    layout, k_layout = (Layout.from_lengths(side) for side in ((3, 0, 4), (2, 2, 6)))

    def attend(*operands, **options):
        return lambda: mx_attention(*operands, layout, k_layout, **options)

    check_refuses(
        [
            (attend(q[0], k, v), ShapeError, "q_THK must have 3 dims"),
            (attend(q, k[..., :3], v), ShapeError, "k_SGK has K=3 but"),
            (attend(q, k, v.to("meta")), DeviceError, "v_SGV must be on"),
            (attend(q.double(), k.double(), v.double()), DtypeError, "q_THK must be fp32, bf16"),
            (attend(q, k.half(), v), DtypeError, "k_SGK must be torch.float32"),
            (attend(q, k, v, window=(-1, 0)), ShapeError, "window must"),
            (attend(q, k, v, scaling="up"), ConfigError, "scaling must be one of mxfp8_rceil"),
            (attend(q, k, v, seed=-1), ConfigError, r"seed must be in \[0, 2\^63\)"),
            (attend(q, k, v, hadamard_seed=2**63), ConfigError, "hadamard_seed must be in"),
            (
                attend(q[..., :8], k[..., :8], v[..., :8], hadamard_seed=1),
                ShapeError,
                "multiple of 32",
            ),
            (attend(q, k, v, scale=math.inf), ConfigError, "scale must be finite"),
            (attend(q, k, v, impl="triton"), UnsupportedError, "needs TRITON_INTERPRET=1"),
        ]
    )


@pytest.mark.parametrize("scaling", ["mxfp8_rceil", "mxfp8_floor"])
@pytest.mark.parametrize("window", WINDOWS)
def test_reference_is_the_oracle(window, scaling):
    given = inputs(*MIXED, heads=4, kv_heads=2, width=40, tail=2)
    found = run(given, MIXED, window=window, scaling=scaling, impl="reference")
    exact = plain(given, MIXED, window=window)
    if scaling == "mxfp8_floor":
        # A probability of 1 may be one that is the last bit under it, whose block has half the
        # scale, and is cut. Rows that see one key have such; their gradients of values go by.
        found, exact = found[:3], exact[:3]
    right = oracle(given, MIXED, window=window, scaling=scaling)[: len(found)]
    for got, expected, true in zip(found, right, exact, strict=True):
        changed = float((expected - true).norm())
        assert changed > 0.01 * float(true.norm())
        assert float((got - expected).norm()) <= 0.05 * changed


LIMITS = (0.06, 0.09, 0.09, 0.06)


def test_errors_are_those_of_eight_bits():
    """On normal numbers; one column 1,000 times the others spoils its blocks, rotated or not."""
    lengths = ((200, 64), (200, 64))
    given = inputs(*lengths, width=64)

    def errors(**options):
        found, exact = run(given, lengths, impl="reference", **options), plain(given, lengths)
        pairs = zip(found, exact, strict=True)
        return [float((got - true).norm() / true.norm()) for got, true in pairs]

    assert all(0.03 < error < limit for error, limit in zip(errors(), LIMITS, strict=True))
    assert all(error < 0.11 for error in errors(scaling="mxfp8_floor"))
    assert all(error < 0.09 for error in errors(hadamard_seed=1))
    given[2][:, :, 3] *= 1000.0
    given[3][:, :, 3] /= 1000.0
    # Values outside of the column, which blocks along keys keep apart and blocks along rows not.
    found, exact = run(given, lengths, impl="reference"), plain(given, lengths)
    others = torch.arange(64) != 3
    for got, true in ((found[0], exact[0]), (found[3], exact[3])):
        error = float((got - true)[..., others].norm() / true[..., others].norm())
        assert error < 0.06
    assert all(0.03 < error < 0.3 for error in errors())


def test_rotation_averages_the_rounding_of_a_large_column():
    """17 lies in the middle of two codes, and is the largest of its block in every query."""
    lengths = ((128,), (128,))
    given = inputs(*lengths, width=64)
    given[0][:, :, 5] = 17.0
    given[1][:, :, 5] *= 4.0
    exact = plain(given, lengths)

    def error(**options):
        found = run(given, lengths, impl="reference", **options)
        return float((found[0] - exact[0]).norm() / exact[0].norm())

    apart, rotated = error(), [error(hadamard_seed=seed) for seed in (2, 3)]
    assert error(hadamard_seed=2) == rotated[0] != rotated[1]
    assert max(rotated) < 0.7 * apart, (apart, rotated)


def test_gradients_rounded_by_chance_are_right_on_average():
    """Their mean over seeds nears what rounding the gradients not at all would give."""
    lengths = ((48,), (48,))
    given = inputs(*lengths, heads=1, kv_heads=1)
    draws = [run(given, lengths, seed=s, impl="reference")[3] for s in range(64)]
    assert not torch.equal(draws[0], draws[1])
    assert torch.equal(draws[5], run(given, lengths, seed=5, impl="reference")[3])
    # The gradient of v is Q(P)ᵀ Q(dO); only dO is rounded by chance.
    q, k, _, grad = (x[:, 0].double() for x in given)
    p = (rounded(q, "mxfp8_rceil") @ rounded(k, "mxfp8_rceil").T * 32**-0.5).softmax(1)
    right = rounded(p.T, "mxfp8_rceil") @ grad
    mean = torch.stack(draws).double().mean(0)[:, 0]
    single = float((draws[0][:, 0] - right).norm())
    # Independent errors of 64 draws: an eighth of one.
    assert float((mean - right).norm()) < 0.2 * single
    nearest = run(given, lengths, impl="reference")[3][:, 0]
    assert float((mean - right).norm()) < 0.5 * float((nearest - right).norm())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_not_finite_is_loud_in_its_sequence_alone(device):
    lengths = ((33, 40, 5), (33, 40, 5))
    clean = run(inputs(*lengths), lengths, device=device)
    for where in range(4):
        check_loud(where, clean, lengths, device=device)


def check_loud(where, clean, lengths, **options):
    given = inputs(*lengths)
    given[where][50, 1, 3] = math.nan if where % 2 else math.inf
    found = run(given, lengths, **options)
    inside = torch.zeros(78, dtype=torch.bool)
    inside[33:73] = True
    spoiled = [not bool(x[inside, 1].isfinite().all()) for x in found]
    assert spoiled[0] == (where < 3)
    assert any(spoiled[1:])
    for got, expected in zip(found, clean, strict=True):
        assert torch.equal(got[~inside], expected[~inside])
        assert torch.equal(got[:, 0], expected[:, 0])


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.interpreter),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("chance", [False, True])
def test_bytes_are_those_of_each_sequence_by_itself(chance, device):
    """Along the width and along tokens, for the kernel that quantises packed sequences."""
    from gem_attention.kernels.mx_attention.kernel import quantize_sequences

    lengths = (40, 0, 1, 33, 32)
    x = inputs(lengths, heads=2, width=40, tail=3)[0]
    offsets = Layout.from_lengths(lengths, device=device).offsets_O
    rows, row_scales, columns, column_scales = (
        t.cpu()
        for t in quantize_sequences(
            x.to(device), offsets, scaling="mxfp8_rceil", decoded=False, rows=True, columns=True,
            seed=7 if chance else None,
        )
    )  # fmt: skip
    numbers = quantize_sequences(
        x.to(device), offsets, scaling="mxfp8_rceil", decoded=True, rows=True, columns=True
    )
    assert not chance or not torch.equal(rows[:40], columns[:40])
    begin = 0
    for b, length in enumerate(lengths):
        at = slice(begin, begin + length)
        first = begin // 32 + b
        begin = at.stop
        for h in range(2 if length else 0):
            by_rows = mx_quantize(x[at, h])
            by_columns = mx_quantize(x[at, h], along="columns")
            strips = slice(first, first + by_columns.scales.shape[0])
            assert torch.equal(row_scales[at, h], by_rows.scales)
            assert torch.equal(column_scales[strips, h], by_columns.scales)
            for made, exact in ((rows, by_rows), (columns, by_columns)):
                difference = made[at, h].int() - exact.elements_TD.int()
                assert bool((difference.abs() <= 1).all())
                assert chance or not bool(difference.any())
            for made, exact in ((numbers[0], by_rows), (numbers[2], by_columns)):
                assert torch.equal(made[at, h].cpu().float(), mx_dequantize(exact))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_same_bits_in_every_run(device):
    given = inputs(*MIXED)
    first = run(given, MIXED, device=device, seed=1)
    for _ in range(2 if device == "cpu" else 10):
        again = run(given, MIXED, device=device, seed=1)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_way_is_told_and_times_are_refused_where_it_is_emulated():
    assert mx_attention_way("cpu") == "reference"
    with pytest.raises(UnsupportedError, match=r"compute capability 10\.x\) to be timed; got cpu"):
        demand_native("cpu")


@pytest.mark.interpreter
def test_way_follows_the_gpu(monkeypatch):
    for capability, way in (((9, 0), "emulated"), ((10, 0), "native"), ((12, 0), "emulated")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert mx_attention_way("cuda") == way


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.device == "cpu" and 0 < sum(c.q_lengths) < 1000],
    ids=lambda case: case.name,
)
def test_cases_equal_the_oracle(case):
    lengths = (case.q_lengths, case.keys)
    given = inputs(*lengths, heads=case.heads, kv_heads=case.kv_heads, width=case.head_width)
    found = run(given, lengths, window=case.window, impl="reference")
    exact = plain(given, lengths, window=case.window)
    check_near(found, oracle(given, lengths, window=case.window), exact)


COUNTS = dict.fromkeys(["q_tokens", "k_tokens", "batch", "left", "right"], "i32")
PLACES = dict.fromkeys(["entries_ptr", "count_ptr", "q_offsets_ptr", "k_offsets_ptr"], "*i32")


def variant(name, operands, results, *, native):
    """One of the attention kernels on width 128, on bytes or on numbers in bf16."""
    kind, tile = ("*fp8e4nv", 128) if native else ("*bf16", 64)
    read = {n: "*u8" if n.endswith("scales_ptr") else kind for n in operands}
    constants = {
        "HEADS": 4, "GROUP": 1, "WIDTH": 128, "VALUE_WIDTH": 128, "BLOCK_K": 128, "BLOCK_V": 128,
        "BLOCKS": 4, "HAS_LEFT": False, "HAS_RIGHT": False, "RCEIL": True, "CAST": True,
        "NATIVE": native, "BLOCK_T": tile, "BLOCK_S": tile,
    }  # fmt: skip
    numbers = {"factor": "fp32"}
    if "backward" in name:
        constants |= {"VALUE_BLOCKS": 4, "CHANCE": False}
        numbers = {"scale": "fp32", "factor": "fp32", "seed": "i64"}
    arguments = {**read, **results, **PLACES, **COUNTS, **numbers}
    return KernelVariant(name, arguments, constants, warps=8 if native else 4, stages=2)


def operands_of(*names):
    return [f"{name}_ptr" for name in names]


FORWARD = operands_of("q", "q_scales", "k", "k_scales", "v", "v_scales")
QUERIES = operands_of(
    "q", "q_scales", "k", "k_scales", "k_columns", "k_column_scales", "v", "v_scales", "grad",
    "grad_scales",
)  # fmt: skip
KEYS = operands_of(
    "q", "q_scales", "q_columns", "q_column_scales", "k", "k_scales", "v", "v_scales", "grad",
    "grad_scales", "grad_columns", "grad_column_scales",
)  # fmt: skip
SUMS = {"lse2_ptr": "*fp32", "delta_ptr": "*fp32"}


@pytest.mark.interpreter
def test_blackwell_attends_by_its_own_instruction():
    """Two products of the forward, three and four of the backward's kernels: all block-scaled."""
    forward = variant(
        "mx_attention_forward_kernel", FORWARD, {"out_ptr": "*bf16", "lse2_ptr": "*fp32"},
        native=True,
    )  # fmt: skip
    backward = [
        variant(
            "mx_attention_backward_queries_kernel", QUERIES, {**SUMS, "grad_q_ptr": "*bf16"},
            native=True,
        ),
        variant(
            "mx_attention_backward_keys_kernel", KEYS,
            {**SUMS, "grad_k_ptr": "*bf16", "grad_v_ptr": "*bf16"}, native=True,
        ),
    ]  # fmt: skip
    module = "gem_attention.portable.scaled"
    done = [
        *compile_kernels(f"{module}.kernel", [forward], capabilities=[100]),
        *compile_kernels(f"{module}.backward.kernel", backward, capabilities=[100]),
    ]
    for kernel, products in zip(done, (2, 3, 4), strict=True):
        assert "kind::mxf8f6f4.block_scale" in kernel.ptx
        # Four steps of 32 in a sum over 128.
        assert kernel.ptx.count("kind::mxf8f6f4.block_scale") == 4 * products


@pytest.mark.triton_ge_3_8
@pytest.mark.interpreter
def test_blackwells_kernels_give_the_emulated_numbers():
    """The scaled products, in the interpreter, beside products of the decoded numbers."""
    from gem_attention.kernels.mx_attention.kernel import launch_backward, launch_forward

    lengths = ((70, 5), (41, 9))
    q, k, v, grad = inputs(*lengths, heads=2, kv_heads=1, width=64)
    offsets = tuple(Layout.from_lengths(side).offsets_O for side in lengths)
    rest = (offsets, (9, 30), 0.125)
    made = []
    for native in (True, False):
        given = {"scaling": "mxfp8_rceil", "native": native}
        with poisoned_empty("all"):
            results = launch_forward((q, k, v), *rest, **given)
            gradients = launch_backward(grad, (q, k, v), results, *rest, seed=None, **given)
        made.append([*results, *gradients])
    for native, emulated in zip(*made, strict=True):
        assert float((native - emulated).norm()) <= 1e-5 * float(emulated.norm())


@pytest.mark.gpu
@pytest.mark.memcheck
def test_right_on_odd_sizes():
    lengths = ((35, 0, 3), (7, 2, 66))
    given = inputs(*lengths, heads=2, kv_heads=1, width=40, tail=1)
    for window in ((None, None), (3, 1)):
        found = run(given, lengths, window=window, impl="triton", device="cuda", seed=1)
        reference = run(given, lengths, window=window, impl="reference", seed=1)
        check_near(found, reference, plain(given, lengths, window=window))
