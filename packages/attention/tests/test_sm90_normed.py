"""The Hopper kernels of ``normed_attention``: what they take, that they compile well, edges."""

import json
import sys
from pathlib import Path

import pytest
import torch

from gem_attention.ops import normed_attention
from gem_jagged.batch import Layout
from gem_opkit.checks import run_fresh
from gem_opkit.testing import check_run_budget, fresh, run_with_gradients

sys.path.insert(0, str(Path(__file__).parent))

from test_normed_attention import inputs, oracle, variant

# Gluon has no interpreter: without a GPU its kernels can only be compiled. Triton hides what the
# assembler says of serialised matrix instructions, so it is asked again.
COMPILE = """
import json, pathlib, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from gem_attention.hopper.launching import REGISTERS, ROWS
from gem_attention.hopper.normed.backward.kernel_sm90 import normed_backward_kernel
from gem_attention.hopper.normed.forward.kernel_sm90 import normed_forward_kernel
from gem_attention.kernels.normed_attention import kernel_sm90 as launching

sys.path.insert(0, {tests!r})

from unwritten_addresses import unwritten_addresses

TOOLS = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)

def tile(rows, width):
    return f"tensordesc<bf16[1,1,{{rows}},{{width}}],{{LAYOUT!r}}>"

def compiled(direction, norms):
    kernel = normed_forward_kernel if direction == "forward" else normed_backward_kernel
    width = launching.WIDTH
    constants = dict(
        ROWS=ROWS, KEYS=launching.KEYS, WIDTH=width, HEADS=1 if norms else 4, NORMS=norms,
        DTYPE=gl.bfloat16, ACTIVATION="gelu", STRETCH=launching.STRETCH, SLOTS=launching.SLOTS,
        KEEPS=True, STAGES=launching.STAGES[norms],
    )
    types = dict.fromkeys(["scale", "eps", "out_eps"], "fp32")
    types |= dict.fromkeys(["tiles", "count", "q_offsets", "k_offsets"], "*i32")
    types |= dict.fromkeys(["x_desc", "a_desc", "g_desc", "out_desc"], tile(ROWS, width))
    types |= dict.fromkeys(["k_desc", "v_desc"], tile(launching.KEYS, width))
    types |= dict.fromkeys(["dx_desc", "dk_desc", "dv_desc"], tile(64, 64))
    names = kernel.arg_names
    constants = {{n: value for n, value in constants.items() if n in names}}
    signature = {{n: "constexpr" if n in constants else types.get(n, "i32") for n in names}}
    aligned = {{(i,): [["tt.divisibility", 16]] for i, n in enumerate(names)
               if signature[n].startswith("*")}}
    values = {{(i,): constants[n] for i, n in enumerate(names) if n in constants}}
    made = triton.compile(
        GluonASTSource(kernel, signature, values, aligned),
        target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4, maxnreg=REGISTERS),
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
    return dict(
        serialised=sorted(set(re.findall(r"C75\\d\\d", said))), stack=int(stack),
        shared=made.metadata.shared, products="HGMMA" in sass,
        unwritten=unwritten_addresses(sass),
    )

print(json.dumps([compiled(*variant) for variant in json.loads({request!r})]))
"""
VARIANTS = [["forward", True], ["backward", True], ["backward", False]]


def test_compiles_for_hopper_without_waiting_products():
    tests = str(Path(__file__).parent)
    code = COMPILE.format(request=json.dumps(VARIANTS), tests=tests)
    for variant_of, report in zip(VARIANTS, json.loads(run_fresh(code)), strict=True):
        assert report["serialised"] == [], variant_of
        assert report["unwritten"] == [], variant_of
        assert report["products"], variant_of
        assert report["shared"] <= 227 * 1024, variant_of
        # An accumulator in memory would need 256 bytes; the backward parks a few addresses.
        most = {("backward", True): 48, ("backward", False): 48}.get(tuple(variant_of), 0)
        assert report["stack"] <= most, variant_of


def test_takes_heads_of_128_with_few_keys():
    code = """
from types import SimpleNamespace
from unittest.mock import patch
import torch
from gem_attention.kernels.normed_attention.kernel_sm90 import supports

def call(heads, width=128, kv_heads=None, dtype=torch.bfloat16, keys=128, names="gelu"):
    x = SimpleNamespace(
        shape=(640, heads * width), dtype=dtype, device=torch.device("cuda")
    )
    k = SimpleNamespace(shape=(128, kv_heads or heads, width), dtype=torch.bfloat16)
    return supports(x, k, most_keys=keys, activations=names)

with patch.object(torch.cuda, "get_device_capability", lambda _: (9, 0)):
    print(call(1), call(4), call(4, names="silu,silu,silu,silu"))
    print(call(4, 64), call(4, kv_heads=2), call(1, dtype=torch.float32), call(1, keys=129))
    print(call(2, names="silu,gelu"))
with patch.object(torch.cuda, "get_device_capability", lambda _: (10, 0)):
    print(call(1))
"""
    assert run_fresh(code).split() == ["True"] * 3 + ["False"] * 6


EDGES = {
    "no_keys": ((70, 3), (0, 0), 0),
    "no_sequences": ((), (), 5),
    "whole_tiles": ((64, 128, 512, 1), (128, 64, 128, 128), 0),
    "past_a_stretch": ((513, 1025), (100, 128), 130),
    "many": (tuple(range(1, 401)), tuple(i % 129 for i in range(400)), 1),
}


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("edge", EDGES)
def test_right_at_the_edges(edge, heads):
    lengths, keys, tail = EDGES[edge]
    x, k, v, *layouts = inputs(lengths, keys, heads=heads, kv_heads=heads, width=128, tail=tail)
    args = (x, *((t.detach() / 128**0.5).requires_grad_() for t in (k, v)), *layouts)
    low = fresh(args, dtype=torch.bfloat16, device="cuda")
    check_run_budget(
        run_with_gradients(variant(impl="triton"), low),
        run_with_gradients(variant(oracle), fresh(low)),
        run_with_gradients(variant(oracle), fresh(low, dtype=torch.float64)),
        what=f"{edge}: ",
    )


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 2])
def test_right_with_strides_and_a_scale_below_zero(heads):
    lengths, keys = (150, 0, 33), (70, 5, 128)
    layouts = [Layout.from_lengths(list(each), device="cuda") for each in (lengths, keys)]
    options = {"device": "cuda", "dtype": torch.bfloat16}
    rows = torch.randn(sum(lengths), heads * 256, **options)
    both = torch.randn(sum(keys), 2 * heads, 128, **options) / 128**0.5
    args = [rows[:, heads * 128 :], both[:, :heads], both[:, heads:]]
    args = [t.detach().requires_grad_() for t in args]
    asked = {"activation": "silu", "scale": -0.1}
    check_run_budget(
        run_with_gradients(
            lambda *a: normed_attention(*a, impl="triton", **asked), (*args, *layouts)
        ),
        run_with_gradients(variant(oracle, **asked), fresh((*args, *layouts))),
        run_with_gradients(variant(oracle, **asked), fresh((*args, *layouts), dtype=torch.float64)),
    )
