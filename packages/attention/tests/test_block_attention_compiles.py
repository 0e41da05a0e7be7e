"""The kernels of block attention compile for Hopper and Blackwell, without a GPU."""

from dataclasses import replace

import pytest

from gem_attention.kernels.block_attention.kernel import block_constants, block_warps
from gem_opkit.compile_checks import KernelVariant, compile_kernels

MODULE = "gem_attention.portable.blocks.kernel"


def kernel(direction, width, block_tokens, dtype, *, rotary=False, group=1, by_tma=False):
    """A variant as the launchers start it."""
    back = direction == "backward"
    constants = block_constants(width, width, block_tokens, single=dtype == "fp32") | {
        "KV_HEADS" if back else "HEADS": 4,
        "GROUP": group,
        "NATURAL": dtype == "fp32",
        "ROTARY": rotary,
        "HAS_GAP": rotary,
        "FAST": dtype != "fp32",
        "RAGGED": by_tma,
    }
    gradients = ("grad_out_ptr", "grad_q_ptr", "grad_k_ptr", "grad_v_ptr")
    tile = f"tensordesc<{dtype}[1,1,{constants['BLOCK_T']},{width}]>" if by_tma else f"*{dtype}"
    unread = "*fp32" if rotary else "*i64"
    strides = ("q_t", "q_h", "k_t", "k_h", "v_t", "v_h", *(("g_t", "g_h") if back else ()))
    arguments = (
        dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", *(gradients if back else ("out_ptr",))), tile)
        | dict.fromkeys(("turns_ptr", "gap_ptr"), unread)
        | {"entries_ptr": "*i32", "count_ptr": "*i32", "offsets_ptr": "*i64"}
        | dict.fromkeys(("tokens", "batch", "block_tokens"), "i32")
        | dict.fromkeys(("scale", "factor") if back else ("factor",), "fp32")
        | {f"stride_{name}": "i32" for name in strides}
    )
    name = f"block_attention_{direction}_kernel"
    return KernelVariant(name, arguments, constants, block_warps(constants))


# Programs on a multiprocessor of Hopper with which blocks of 64 were timed.
RESIDENT = {"forward": 4, "backward": 3}


@pytest.mark.parametrize("by_tma", [True, False])
def test_block_attention_compiles(by_tma):
    variants = [
        kernel("forward", 128, 64, "bf16", rotary=True, by_tma=by_tma),
        kernel("backward", 128, 64, "bf16", rotary=True, by_tma=by_tma),
        *([kernel("backward", 64, 32, "fp16", group=2)] if not by_tma else []),
    ]
    for report in compile_kernels(MODULE, variants):
        assert any(word in report.ptx for word in ("mma.sync", "wgmma", "tcgen05.mma"))
        assert ("cp.async.bulk.tensor" in report.ptx) == by_tma
        if report.variant.constants["ROTARY"]:
            assert "sin.approx" in report.ptx
        assert report.stack_bytes == 0, report.variant
        if report.capability == 90 and by_tma:
            programs = RESIDENT[report.variant.kernel.split("_")[2]]
            assert programs * 128 * report.registers <= 65_536, report.variant
            assert programs * (report.shared_bytes + 1024) <= 228 * 1024, report.variant


def test_a_tile_that_is_too_large_for_its_warps_is_seen_to_spill():
    # What the other tests would miss, if the report were empty.
    large = kernel("backward", 128, 128, "bf16", by_tma=True)
    (report,) = compile_kernels(MODULE, [replace(large, warps=4)], capabilities=(90,))
    assert report.stack_bytes > 0


def test_wide_heads_and_single_precision_compile():
    variants = [
        kernel("forward", 16, 64, "fp32", rotary=True),
        kernel("backward", 136, 64, "bf16", rotary=True),
    ]
    for report in compile_kernels(MODULE, variants, capabilities=(90,)):
        assert report.stack_bytes == 0, report.variant
        # No TF32, and angles without the special-function unit.
        if report.variant.constants["NATURAL"]:
            assert not any(word in report.ptx for word in ("wgmma", "mma.sync", "sin.approx"))
