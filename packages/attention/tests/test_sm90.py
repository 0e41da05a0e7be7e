"""The Hopper kernels: what they take, that they compile well, and that they are right."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gem_attention.activations import ACTIVATION_NAMES, activate
from gem_attention.patterns import window_mask
from gem_opkit.budget import check_budget
from gem_opkit.checks import run_fresh

sys.path.insert(0, str(Path(__file__).parent))

from support_matrix import FULL, HOPPER_PATTERNS, HOPPER_WIDTHS
from unwritten_addresses import unwritten_addresses

# Gluon has no interpreter, so without a GPU the kernels can only be compiled. Triton hides what
# the assembler says of serialised matrix instructions, so it is asked again.
COMPILE = """
import json, pathlib, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from gem_attention.hopper.backward.fused.kernel_sm90 import backward_kernel
from gem_attention.hopper.forward.kernel_sm90 import _REGISTERS as REGISTERS
from gem_attention.hopper.forward.streaming.kernel_sm90 import forward_kernel
from gem_attention.hopper.windowed.keys.kernel_sm90 import grad_keys_kernel
from gem_attention.hopper.windowed.queries.kernel_sm90 import grad_queries_kernel

sys.path.insert(0, {tests!r})

from unwritten_addresses import unwritten_addresses

TOOLS = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"

def described(dtype, block, swizzle=128):
    bits = 32 if dtype == "fp32" else 16
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=swizzle, element_bitwidth=bits, rank=len(block)
    )
    return f"tensordesc<{{dtype}}{{list(block)}},{{layout!r}}>".replace(", ", ",", len(block) - 1)

# Offsets in shared memory that TMA reads or writes and that are no multiples of 128.
def unaligned(ptx):
    places = {{register for line in ptx.splitlines() if "cp." in line and ".bulk.tensor" in line
              for register in re.findall(r"\\[(%r\\d+)\\]", line)[:1]}}
    added = re.findall(r"add\\.s32 \\t(%r\\d+), %r\\d+, (\\d+);", ptx)
    return sorted(int(offset) for register, offset in added
                  if register in places and int(offset) % 128)

def compiled(kind, dtype, width, keys, stages, left, right, group, activation="softmax"):
    # The backward has 128 queries a tile at width 64.
    rows = 128 if kind == "backward" and width == 64 else 64
    constants = dict(
        GROUP=group, ROWS=rows, KEYS=keys, WIDTH=width, STAGES=stages, LEFT=left, RIGHT=right,
        DTYPE=gl.bfloat16 if dtype == "bf16" else gl.float16, ACTIVATION=activation,
        ACTIVATIONS=activation,
    )
    tile = described(dtype, (1, 1, rows, width))
    block = described(dtype, (1, 1, keys, width))
    half = described(dtype, (1, 1, keys // 2, width))
    line = described("fp32", (1, rows), 0)
    types = dict(
        q_desc=tile, o_desc=tile, g_desc=tile, k_desc=block, v_desc=block, lse_desc=line,
        delta_desc=line, dq_desc=described("fp32", (128, 32)), dk_desc=half, dv_desc=half,
        piece_desc=described("fp32", (128, 32)), rows_desc=described(dtype, (1, 1, 64, 64)),
        lse="*fp32", sums="*fp32", grad_q="*" + dtype,
        tiles="*i32", count="*i32", bounds="*i32", q_offsets="*i32", k_offsets="*i32",
        scale="fp32",
    )
    registers = 168
    if kind.startswith("forward"):
        consumers = int(kind[-1])
        slots = 2 if consumers == 2 or width == 64 else 1
        registers = REGISTERS[consumers]
        constants |= dict(HEADS=4, CONSUMERS=consumers, SLOTS=slots)
        # Each of these with and without.
        constants |= dict(EVEN=consumers == 2 and not (left or right), SHARED=consumers == 3)
        kernel = forward_kernel
    elif kind != "backward":
        kernel = grad_keys_kernel if kind == "keys" else grad_queries_kernel
        constants |= dict(HEADS=4, KV_HEADS=4 // group, HAS_GRAD_LSE=group == 1)
        types |= dict(dq_desc=tile, dk_desc=tile, dv_desc=tile, out_desc=tile)
        types |= dict.fromkeys(("lse", "grad_lse", "lse_lines", "delta_lines"), "*fp32")
    else:
        kernel, constants = backward_kernel, constants | dict(KV_HEADS=1, ALL_HEADS=4)
        constants |= dict(SHARED=activation == "silu")
    names = kernel.arg_names
    constants = {{n: value for n, value in constants.items() if n in names}}
    signature = {{n: "constexpr" if n in constants else types.get(n, "i32") for n in names}}
    aligned = {{(i,): [["tt.divisibility", 16]] for i, n in enumerate(names)
               if signature[n].startswith("*")}}
    values = {{(i,): constants[n] for i, n in enumerate(names) if n in constants}}
    ptx = triton.compile(
        GluonASTSource(kernel, signature, values, aligned),
        target=GPUTarget("cuda", 90, 32), options={{"num_warps": 4, "maxnreg": registers}},
    ).asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        said = subprocess.run(
            [TOOLS / "ptxas", "-v", "--gpu-name=sm_90a", source, "-o", folder + "/kernel.cubin"],
            capture_output=True, text=True, check=True,
        ).stderr
        sass = subprocess.run(
            [TOOLS / "nvdisasm", "-c", folder + "/kernel.cubin"],
            capture_output=True, text=True, check=True,
        ).stdout
    stack, = re.findall(r"(\\d+) bytes stack frame", said)
    return dict(
        serialised=sorted(set(re.findall(r"C75\\d\\d", said))), stack=int(stack),
        wgmma="wgmma.mma_async" in ptx, tma="cp.async.bulk.tensor" in ptx,
        adds="cp.reduce.async.bulk.tensor" in ptx, unaligned=unaligned(ptx),
        unwritten=unwritten_addresses(sass), products="HGMMA" in sass,
    )

print(json.dumps([compiled(*variant) for variant in json.loads({request!r})]))
"""
# Kind and number of consumers, dtype, width, keys, stages, left, right, group, activation where not
# softmax.
VARIANTS: list[list[Any]] = [
    ["forward2", "bf16", 128, 128, 2, False, False, 1],
    ["forward3", "fp16", 64, 64, 4, False, False, 1],
    ["forward2", "bf16", 128, 64, 4, True, True, 2],
    ["forward2", "fp16", 64, 128, 4, False, True, 1],
    ["forward3", "bf16", 128, 64, 4, False, False, 1, "silu"],
    ["forward2", "bf16", 128, 64, 4, True, False, 2, "gelu"],
    ["backward", "bf16", 128, 128, 2, False, False, 1],
    ["backward", "bf16", 128, 128, 2, True, True, 2],
    ["backward", "fp16", 64, 128, 2, False, False, 1],
    ["backward", "bf16", 128, 128, 2, False, False, 1, "silu"],
    ["queries", "bf16", 128, 64, 3, True, True, 1],
    ["keys", "bf16", 128, 64, 3, True, True, 1],
    ["keys", "fp16", 64, 64, 3, True, True, 2],
]


def test_every_variant_compiles_for_hopper_without_waiting_products():
    tests = str(Path(__file__).parent)
    code = COMPILE.format(request=json.dumps(VARIANTS), tests=tests)
    reports = json.loads(run_fresh(code, timeout_s=300))
    for variant, report in zip(VARIANTS, reports, strict=True):
        assert report["serialised"] == [], variant
        assert report["wgmma"], variant
        assert report["unaligned"] == [], variant
        assert report["products"], variant
        assert report["unwritten"] == [], variant
        assert report["tma"], variant
        assert report["adds"] == (variant[0] == "backward"), variant
        # Accumulators in memory would need 256 bytes and more; the backward parks a few addresses.
        most = {"backward": 208, "queries": 8}.get(variant[0], 0)
        assert report["stack"] <= most, variant


def test_takes_nothing_without_a_hopper_gpu():
    code = """
import torch
from gem_attention.kernels.jagged_flash_attention.kernel_sm90 import supports
x = torch.zeros(8, 2, 64, dtype=torch.bfloat16)
print(supports(x, x, x, window=(None, None), deterministic=False))
"""
    assert run_fresh(code).strip() == "False"


# Two arms with the same operand: written in the first, read in both.
ARMS = """
        /*0000*/                   ULDC UR4, c[0x0][0x210] ;
        /*0010*/              @P0 BRA `(.L_x_1) ;
        /*0020*/                   UIADD3 UR4, UR8, 0x2, URZ ;
        /*0030*/                   UMOV.64 UR6, UR10 ;
        /*0040*/                   UMOV UR5, UR9 ;
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
.L_x_1:
        /*0060*/                   UMOV.64 UR6, UR10 ;
        /*0070*/                   UMOV UR5, UR9 ;
        /*0080*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0090*/                   HGMMA.64x128x16.F32.BF16 R24, R56, gdesc[UR4].tnspB, R24 ;
        /*00a0*/                   EXIT ;
"""


def test_addresses_that_one_arm_leaves_unwritten_are_found():
    found = unwritten_addresses(ARMS)
    assert [text.split()[0] for text in found] == ["0080"]
    assert found[0].endswith("UR4")
    assert unwritten_addresses(ARMS.replace("@P0 BRA `(.L_x_1)", "NOP")) == []


def test_three_consumers_where_sequences_are_long():
    code = """
from gem_attention.hopper.forward.kernel_sm90 import choose_tiling
full = (None, None)
for width, window, queries, keys, softmax in (
    (128, full, 1024, 1024, False), (128, full, 1024, 1024, True), (64, full, 1024, 1024, True),
    (128, full, 1024, 256, False), (64, full, 256, 1024, True), (64, (128, 128), 4096, 4096, True),
):
    print(choose_tiling(width, window, queries, keys, softmax=softmax).consumers)
"""
    assert run_fresh(code).split() == ["3", "2", "3", "2", "2", "2"]


# In a process of its own, as every test that imports Gluon on a CPU.
def test_heads_with_different_activations_are_launches_of_their_own():
    code = """
from gem_attention.hopper.launching import runs
for call in (
    ("softmax", 6, 2), ("gelu,gelu,gelu", 3, 3), ("relu,silu,silu,relu", 4, 4),
    ("gelu,gelu,gelu,gelu,relu,relu", 6, 3), ("relu,relu,relu,silu,silu,silu", 6, 3),
):
    print(*(
        f"{r.activation}:{r.heads.start}-{r.heads.stop}:{r.kv_heads.start}-{r.kv_heads.stop}"
        for r in runs(*call)
    ))
"""
    assert run_fresh(code).splitlines() == [
        "softmax:0-6:0-2",
        "gelu:0-3:0-3",
        "relu:0-1:0-1 silu:1-3:1-3 relu:3-4:3-4",
        "gelu:0-4:0-2 relu:4-6:2-3",
        # The heads of the second key head are cut, and no head goes with those of another.
        "relu:0-2:0-1 relu:2-3:1-2 silu:3-4:1-2 silu:4-6:2-3",
    ]


def test_a_backward_with_different_activations_is_left_to_the_plain_kernels():
    code = """
from unittest.mock import patch
import torch
from gem_attention.kernels.generalized_attention import kernel, op

class OnHopper(torch.Tensor):
    is_cuda = True

x = torch.zeros(64, 4, 128, dtype=torch.bfloat16).as_subclass(OnHopper)
with patch.object(torch.cuda, "get_device_capability", lambda _: (9, 0)):
    for names in ("silu", "gelu,gelu,gelu,gelu", "relu,silu,gelu,silu"):
        for backward in (False, True):
            chosen = op._kernels(
                x, x, x, batch=1, window=(9, 0), deterministic=False, activations=names,
                backward=backward,
            )
            print(chosen is kernel)
"""
    assert run_fresh(code).split() == ["False"] * 5 + ["True"]


LENGTHS: dict[str, tuple[list[int], list[int]]] = {
    "self": ([300, 1, 64, 129, 0, 128, 700], [300, 1, 64, 129, 0, 128, 700]),
    "empty_sides": ([0, 37, 0, 200, 0], [5, 0, 0, 129, 7]),
    "more_keys": ([100, 257, 64, 9], [333, 300, 500, 64]),
    "fewer_keys": ([333, 300, 500, 64], [100, 257, 64, 9]),
    # Long enough in the mean for three consumers.
    "long": ([1000, 0, 1500, 1, 1400], [900, 700, 1300, 0, 1100]),
}


def packed(
    lengths: tuple[list[int], list[int]], *, width=128, group=2, dtype=torch.bfloat16, tail=3
):
    """Draw operands on the GPU, with rows of NaN behind the last sequence."""
    heads = 2 * group
    q_tokens, k_tokens = (sum(side) for side in lengths)
    q = torch.randn(q_tokens + tail, heads, width, device="cuda", dtype=dtype)
    k, v = (torch.randn(k_tokens + tail, 2, width, device="cuda", dtype=dtype) for _ in range(2))
    grad_out = torch.randn_like(q)
    grad_lse = torch.randn(q_tokens + tail, heads, device="cuda")
    for x, tokens in [(q, q_tokens), (k, k_tokens), (v, k_tokens), (grad_out, q_tokens)]:
        x[tokens:] = torch.nan
    grad_lse[q_tokens:] = torch.nan
    offsets = [torch.tensor([0, *side]).cumsum(0).to("cuda", torch.int32) for side in lengths]
    return q, k, v, grad_out, grad_lse, *offsets


def attended(operands, lengths, window, scale, dtype):
    """Compute out, lse and the gradients with the masks of ``patterns``, a sequence at a time."""
    q, k, v, grad_out, grad_lse, *_ = operands
    leaves = [x.to(dtype).detach().requires_grad_() for x in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q, dtype=dtype)
    lse = torch.full(q.shape[:2], -torch.inf, device="cuda", dtype=dtype)
    total = sum(x[:0].sum() for x in leaves)
    q_begin = k_begin = 0
    for q_length, k_length in zip(*lengths, strict=True):
        rows, keys = slice(q_begin, q_begin + q_length), slice(k_begin, k_begin + k_length)
        q_begin, k_begin = rows.stop, keys.stop
        if not q_length or not k_length:
            continue
        q_i = leaves[0][rows].transpose(0, 1)
        k_i, v_i = (x[keys].transpose(0, 1).repeat_interleave(group, 0) for x in leaves[1:])
        mask = window_mask(q_length, k_length, *window).cuda()
        score = (q_i @ k_i.transpose(1, 2) * scale).masked_fill(~mask, -torch.inf)
        sees = mask.any(1)
        lse_i = torch.logsumexp(score[:, sees], -1)
        out_i = torch.exp(score[:, sees] - lse_i[..., None]) @ v_i
        total = total + (out_i * grad_out[rows][sees].to(dtype).transpose(0, 1)).sum()
        total = total + (lse_i * grad_lse[rows][sees].to(dtype).transpose(0, 1)).sum()
        at = torch.arange(rows.start, rows.stop, device="cuda")[sees]
        out[at] = out_i.detach().transpose(0, 1)
        lse[at] = lse_i.detach().transpose(0, 1)
    return out, lse, *torch.autograd.grad(total, leaves)


def launched(operands, window, scale):
    from gem_attention.kernels.jagged_flash_attention import kernel_sm90

    q, k, v, grad_out, grad_lse, q_offsets, k_offsets = operands
    assert kernel_sm90.supports(q, k, v, window=window, deterministic=False)
    offsets = {"window": window, "scale": scale}
    out, lse = kernel_sm90.launch_forward(q, k, v, q_offsets, k_offsets, **offsets)
    gradients = kernel_sm90.launch_backward(
        grad_out, grad_lse, q, k, v, out, lse, q_offsets, k_offsets, **offsets, deterministic=False
    )
    return out, lse, *gradients


def check_right(operands, lengths, window):
    scale = operands[0].shape[2] ** -0.5
    actual = launched(operands, window, scale)
    low = attended(operands, lengths, window, scale, operands[0].dtype)
    exact = attended(operands, lengths, window, scale, torch.float64)
    sides = [sum(lengths[0])] * 3 + [sum(lengths[1])] * 2
    names = ["out", "lse", "grad_q", "grad_k", "grad_v"]
    for name, tokens, *trio in zip(names, sides, actual, low, exact, strict=True):
        mine, theirs, truth = (x[:tokens] for x in trio)
        check_budget(mine, theirs.to(mine.dtype), truth, what=f"{name} of {window}")
        tail = trio[0][tokens:]
        empty = -math.inf if name == "lse" else 0.0
        assert torch.equal(tail, torch.full_like(tail, empty)), name


@pytest.mark.gpu
@pytest.mark.parametrize("case", HOPPER_PATTERNS, ids=lambda case: case.id)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_right_for_every_pattern(lengths, case):
    operands = packed(lengths, width=case.width, dtype=getattr(torch, *case.dtypes))
    check_right(operands, lengths, case.window)


@pytest.mark.gpu
@pytest.mark.parametrize("case", HOPPER_WIDTHS, ids=lambda case: case.id)
@pytest.mark.parametrize("lengths", ["self", "long"])
def test_right_for_widths_and_dtypes(lengths, case):
    for name in case.dtypes:
        operands = packed(LENGTHS[lengths], width=case.width, group=1, dtype=getattr(torch, name))
        check_right(operands, LENGTHS[lengths], case.window)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(
    "lengths",
    [([300, 64, 129], [255, 257, 256]), ([600, 500], [1023, 1025]), ([90, 1], [128, 128])],
)
def test_right_where_the_mean_alone_fills_its_tiles(lengths, width):
    # Then keys are masked only where a tile is not full.
    check_right(packed(lengths, width=width, tail=0), lengths, FULL)


@pytest.mark.gpu
def test_reads_slices_of_a_fused_tensor_in_place():
    lengths = LENGTHS["self"]
    q, _, _, *rest = packed(lengths, group=1, tail=0)
    fused = torch.randn(q.shape[0], 3, *q.shape[1:], device="cuda", dtype=q.dtype)
    check_right((*fused.unbind(1), *rest), lengths, (None, 0))


# With the rows behind the last sequence 256 keys in the mean, which take the large tiles.
EQUALLY_MANY_KEYS = ([300, 64, 129], [255, 255, 255])


def activated(operands, lengths, window, scale, dtype, names):
    """Compute out of generalized attention, a sequence at a time; ``names`` is one a head."""
    q, k, v = (x.to(dtype) for x in operands[:3])
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    q_begin = k_begin = 0
    for q_length, k_length in zip(*lengths, strict=True):
        rows, keys = slice(q_begin, q_begin + q_length), slice(k_begin, k_begin + k_length)
        q_begin, k_begin = rows.stop, keys.stop
        k_i, v_i = (x[keys].transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
        score = q[rows].transpose(0, 1) @ k_i.transpose(1, 2) * scale
        weight = torch.stack([activate(n, s) for n, s in zip(names, score, strict=True)])
        weight = weight * window_mask(q_length, k_length, *window).cuda()
        out[rows] = (weight @ v_i).transpose(0, 1)
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("names", [*ACTIVATION_NAMES, "relu,silu,gelu,silu", "relu,relu,silu,gelu"])
def test_activations_are_right(names):
    from gem_attention.hopper.forward.kernel_sm90 import launch_forward

    each = names.split(",") * (4 if "," not in names else 1)
    for lengths in (*LENGTHS.values(), EQUALLY_MANY_KEYS):
        operands = packed(lengths)
        q, k, v, _, _, q_offsets, k_offsets = operands
        scale = -0.07 if lengths is EQUALLY_MANY_KEYS else 0.07
        for window in (FULL, (100, 20)):
            options = {"window": window, "scale": scale}
            out, lse = launch_forward(q, k, v, q_offsets, k_offsets, **options, activations=names)
            again, _ = launch_forward(q, k, v, q_offsets, k_offsets, **options, activations=names)
            low, exact = (
                activated(operands, lengths, window, scale, dtype, each)
                for dtype in (torch.bfloat16, torch.float64)
            )
            tokens = sum(lengths[0])
            what = f"{names} with {window}"
            check_budget(out[:tokens], low[:tokens], exact[:tokens], what=what)
            assert torch.equal(out, again), what
            assert not out[tokens:].any(), what
            assert lse.numel() == 0, what


@pytest.mark.gpu
def test_keys_have_one_owner():
    operands = packed(LENGTHS["self"])
    first = launched(operands, FULL, 0.1)
    for _ in range(10):
        again = launched(operands, FULL, 0.1)
        for name, a, b in zip(["out", "lse", "q", "grad_k", "grad_v"], first, again, strict=True):
            if name != "q":  # dQ is added up in no fixed order
                assert torch.equal(a, b), name


@pytest.mark.gpu
def test_refuses_what_it_does_not_take():
    from gem_attention.kernels.jagged_flash_attention.kernel_sm90 import supports

    def taken(x, *, deterministic=False, batch=1, window=FULL):
        return supports(x, x, x, window=window, deterministic=deterministic, batch=batch)

    good = torch.zeros(64, 2, 128, device="cuda", dtype=torch.bfloat16)
    assert taken(good)
    assert not taken(good, deterministic=True)
    assert not taken(good, deterministic=True, window=(600, 9))
    assert taken(good, deterministic=True, window=(9, 5))
    assert not taken(good, batch=3)  # mostly padding
    assert not taken(good.float())
    assert not taken(good[..., :96])
    assert not taken(good.transpose(0, 1).contiguous().transpose(0, 1))  # heads apart
    wide = torch.zeros(64 * 260 + 8, device="cuda", dtype=torch.bfloat16)
    assert not taken(wide[4 : 4 + 64 * 256].view(64, 2, 128))  # begins at 8 bytes
    assert not taken(wide[: 64 * 260].view(64, 260)[:, :256].unflatten(1, (2, 128)))
