"""The Hopper kernels of block attention: what they take, that they compile well, and are right."""

import json
import sys
from pathlib import Path

import pytest
import torch

from gem_attention.ops import block_attention
from gem_jagged.batch import Layout
from gem_opkit.checks import run_fresh
from gem_opkit.testing import (
    check_kernel_on_gpu,
    check_run_budget,
    fresh,
    run_with_gradients,
)

sys.path.insert(0, str(Path(__file__).parent))

from support_matrix import HOPPER_BLOCKS
from test_block_attention import gpu_inputs, oracle, variant, with_impl

# Gluon has no interpreter: without a GPU its kernels can only be compiled. Triton hides what the
# assembler says of serialised matrix instructions, so it is asked again.
COMPILE = """
import json, pathlib, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from gem_attention.hopper.blocks import kernel_sm90 as device
from gem_attention.kernels.block_attention import kernel_sm90 as launching

sys.path.insert(0, {tests!r})

from unwritten_addresses import unwritten_addresses

TOOLS = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)

def compiled(direction, width, rotary):
    kernel = getattr(device, f"block_{{direction}}_kernel")
    options = dict(num_warps=launching.WARPS)
    if direction == "forward":
        options["maxnreg"] = launching.FORWARD_REGISTERS
    constants = dict(
        HEADS=3, GROUP=1, ROWS=launching.ROWS, WIDTH=width, ROTARY=rotary, HAS_GAP=rotary,
        DTYPE=gl.bfloat16,
    )
    tile = f"tensordesc<bf16[1,1,{{launching.ROWS}},{{width}}],{{LAYOUT!r}}>"
    types = dict.fromkeys(["scale", "factor"], "fp32")
    types |= dict.fromkeys(["tiles", "count", "offsets"], "*i32")
    types |= dict.fromkeys(["turns_ptr", "gap_ptr"], "*fp32" if rotary else "*i32")
    names = kernel.arg_names
    types |= {{n: tile for n in names if n.endswith("_desc")}}
    constants = {{n: value for n, value in constants.items() if n in names}}
    signature = {{n: "constexpr" if n in constants else types.get(n, "i32") for n in names}}
    aligned = {{(i,): [["tt.divisibility", 16]] for i, n in enumerate(names)
               if signature[n].startswith("*")}}
    values = {{(i,): constants[n] for i, n in enumerate(names) if n in constants}}
    made = triton.compile(
        GluonASTSource(kernel, signature, values, aligned),
        target=GPUTarget("cuda", 90, 32), options=options,
    )
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "kernel.ptx"
        source.write_text(made.asm["ptx"])
        said = subprocess.run(
            [TOOLS / "ptxas", "-v", "--gpu-name=sm_90a", source, "-o", folder + "/kernel.cubin"],
            capture_output=True, text=True, check=True,
        ).stderr
        sass = subprocess.run(
            [TOOLS / "nvdisasm", "-c", folder + "/kernel.cubin"],
            capture_output=True, text=True, check=True,
        ).stdout
    stack, = re.findall(r"(\\d+) bytes stack frame", said)
    registers, = re.findall(r"Used (\\d+) registers", said)
    return dict(
        serialised=sorted(set(re.findall(r"C75\\d\\d", said))), stack=int(stack),
        registers=int(registers), shared=made.metadata.shared, products=sass.count("HGMMA"),
        unwritten=unwritten_addresses(sass),
    )

print(json.dumps([compiled(*variant) for variant in json.loads({request!r})]))
"""
VARIANTS = [["forward", 128, True], ["backward", 128, False], ["backward", 128, True]]


def test_compiles_for_hopper_without_waiting_products():
    tests = str(Path(__file__).parent)
    code = COMPILE.format(request=json.dumps(VARIANTS), tests=tests)
    for variant_of, report in zip(VARIANTS, json.loads(run_fresh(code)), strict=True):
        direction, _, rotary = variant_of
        assert report["serialised"] == [], variant_of
        assert report["unwritten"] == [], variant_of
        # 64 x 128 x 16 an instruction: 8 a product.
        assert report["products"] == 8 * (2 if direction == "forward" else 5), variant_of
        # An accumulator in memory would need 256 bytes; turning parks a few addresses.
        assert report["stack"] <= (48 if rotary else 0), variant_of
        programs = 2 if direction == "forward" else 1
        assert programs * 256 * report["registers"] <= 65_536, variant_of
        assert programs * (report["shared"] + 1024) <= 228 * 1024, variant_of


def test_takes_blocks_that_fill_their_tiles():
    code = """
from unittest.mock import patch
import torch
from gem_attention.kernels.block_attention import kernel, op

class OnHopper(torch.Tensor):
    is_cuda = True

def drawn(heads, width, dtype=torch.bfloat16):
    return torch.zeros(256, heads, width, dtype=dtype).as_subclass(OnHopper)

q, k = drawn(4, 128), drawn(2, 128)
with patch.object(torch.cuda, "get_device_capability", lambda _: (9, 0)):
    for operands, block_tokens in (
        ((q, q, q), 128), ((q, q, q), 65), ((q, k, k), 128), ((q, q, q, q), 128),
        ((q, q, q), 64), ((q, k, k, q), 128), ((drawn(4, 32),) * 3, 128),
        ((drawn(4, 128, torch.float32),) * 3, 128), ((q, q, drawn(4, 64)), 128),
    ):
        print(op._kernels(*operands, block_tokens=block_tokens) is not kernel)
with patch.object(torch.cuda, "get_device_capability", lambda _: (10, 0)):
    print(op._kernels(q, q, q, block_tokens=128) is not kernel)
"""
    assert run_fresh(code).split() == ["True"] * 4 + ["False"] * 6


@pytest.mark.gpu
@pytest.mark.parametrize("rotary", ["none", "rote"])
@pytest.mark.parametrize(
    ("block_tokens", "case"), HOPPER_BLOCKS, ids=[f"{n}-{case.id}" for n, case in HOPPER_BLOCKS]
)
def test_right_at_the_edges_of_blocks(block_tokens, case, rotary):
    check_kernel_on_gpu(
        with_impl(block_tokens=block_tokens, rotary=rotary),
        variant(oracle, block_tokens=block_tokens, rotary=rotary),
        gpu_inputs((300, 129, 0, 128, 1, 513, 65, 64), 3, 3, (case.width, case.value_width)),
        dtypes=[getattr(torch, name) for name in case.dtypes],
    )


@pytest.mark.gpu
@pytest.mark.parametrize("rotary", ["none", "rote"])
def test_every_turn_of_a_program_is_right(rotary):
    # Some 700 items, five or six a program: every tile of shared memory is used again.
    lengths = [(97 * i) % 700 for i in range(60)]
    given = fresh(gpu_inputs(lengths, 4, 4, (128, 128)), dtype=torch.bfloat16, device="cuda")
    attend = variant(block_tokens=128, rotary=rotary, impl="triton")
    by_oracle = variant(oracle, block_tokens=128, rotary=rotary)
    first, again = (run_with_gradients(attend, fresh(given)) for _ in range(2))
    for a, b in zip(first.outputs + first.gradients, again.outputs + again.gradients, strict=True):
        assert torch.equal(a, b)
    check_run_budget(
        first,
        run_with_gradients(by_oracle, fresh(given)),
        run_with_gradients(by_oracle, fresh(given, dtype=torch.float64)),
    )


@pytest.mark.gpu
def test_a_replayed_graph_follows_other_lengths():
    q, k, v, upstream = (
        torch.randn(6000, 4, 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for _ in range(4)
    )

    def attended(layout):
        out = block_attention(q, k, v, layout, block_tokens=128, visible_pairs=0, impl="triton")
        return out, *torch.autograd.grad(out, (q, k, v), upstream)

    layouts = [
        Layout.from_lengths(lengths, device="cuda")
        for lengths in ([6000, 0, 0], [5, 700, 3001], [128, 129, 5743])
    ]
    offsets_O = layouts[0].offsets_O.clone()
    first = layouts[0]
    captured = Layout(offsets_O, first.lengths, first.max_length, first.total_tokens)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        attended(captured)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = attended(captured)
    for layout in layouts:
        offsets_O.copy_(layout.offsets_O)
        graph.replay()
        for a, b in zip(replayed, attended(layout), strict=True):
            assert torch.equal(a, b)
