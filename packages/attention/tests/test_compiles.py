"""Every kernel of attention compiles for Hopper and Blackwell, without a GPU."""

import sys
from pathlib import Path

import pytest

from gem_attention.activations import ACTIVATION_NAMES
from gem_attention.tiling.sizes import default_config, short_rows
from gem_opkit.compile_checks import KernelVariant, compile_kernels
from gem_opkit.tuning import LaunchConfig

sys.path.insert(0, str(Path(__file__).parent))

from support_matrix import COMPILED

ATTENTION = "gem_attention.portable.launching.kernel"
SOFTMAX = "gem_attention.kernels.jagged_flash_attention.kernel"
COUNTS = ("q_tokens", "k_tokens", "batch", "left", "right")
FORWARD_POINTERS = ("q_ptr", "k_ptr", "v_ptr", "out_ptr")
BACKWARD_POINTERS = ("q_ptr", "k_ptr", "v_ptr", "grad_out_ptr")
LIST = {
    "entries_ptr": "*i32",
    "count_ptr": "*i32",
    "q_offsets_ptr": "*i64",
    "k_offsets_ptr": "*i64",
}
STRIDES = ("q_t", "q_h", "k_s", "k_h", "v_s", "v_h")


def arguments(dtype, pointers, floats, scalars, strides, *, counts=COUNTS):
    return (
        dict.fromkeys(pointers, f"*{dtype}")
        | dict.fromkeys(floats, "*fp32")
        | LIST
        | dict.fromkeys(counts, "i32")
        | dict.fromkeys(scalars, "fp32")
        | {f"stride_{name}": "i32" for name in strides}
    )


def constants(width, dtype, windowed, config, *, rows, columns, activations="softmax"):
    block = max(16, 1 << (width - 1).bit_length())
    return {
        "GROUP": 2 if windowed else 1,
        "WIDTH": width,
        "VALUE_WIDTH": width,
        "BLOCK_K": block,
        "BLOCK_V": block,
        "NATURAL": dtype == "fp32",
        "ACTIVATIONS": activations,
        "FAST": activations != "softmax" and dtype != "fp32",
        "HAS_LEFT": windowed,
        "HAS_RIGHT": windowed,
        rows: config.block_rows,
        columns: config.block_columns,
        "STAGES": config.stages,
    }


def config_of(kernel, width, dtype, *, mean=0):
    size = 4 if dtype == "fp32" else 2
    return default_config(
        kernel, width=1 << (width - 1).bit_length(), element_bytes=size, mean=mean
    )


def forward(width, dtype, *, windowed=False, activations="softmax"):
    config = config_of("forward", width, dtype)
    kept = constants(
        *(width, dtype, windowed, config),
        rows="BLOCK_T",
        columns="BLOCK_S",
        activations=activations,
    )
    return KernelVariant(
        "jagged_flash_attention_forward_kernel",
        arguments(dtype, FORWARD_POINTERS, ["lse_ptr"], ["factor"], STRIDES),
        {"HEADS": 4} | kept,
        config.warps,
        config.stages,
    )


def backward(kernel, width, dtype, *, windowed=False, activations="softmax"):
    config = config_of(kernel, width, dtype)
    queries = kernel == "backward_queries"
    written = ["grad_q_ptr"] if queries else ["grad_k_ptr", "grad_v_ptr"]
    sides = ("BLOCK_T", "BLOCK_S") if queries else ("BLOCK_S", "BLOCK_T")
    return KernelVariant(
        f"jagged_flash_attention_{kernel}_kernel",
        arguments(
            dtype,
            [*BACKWARD_POINTERS, *written],
            ["lse2_ptr", "delta_ptr"],
            ["scale", "factor"],
            (*STRIDES, "g_t", "g_h"),
        ),
        {"HEADS" if queries else "KV_HEADS": 4, "SHORT_T": 0}
        | constants(
            *(width, dtype, windowed, config),
            rows=sides[0],
            columns=sides[1],
            activations=activations,
        ),
        config.warps,
        config.stages,
    )


def short(width, dtype, rows):
    config = LaunchConfig(rows, 64, 4, 2)
    kept = constants(width, dtype, False, config, rows="BLOCK_T", columns="BLOCK_S")
    return KernelVariant(
        "jagged_flash_attention_backward_short_kernel",
        arguments(
            dtype,
            [*BACKWARD_POINTERS, "grad_q_ptr", "grad_k_ptr", "grad_v_ptr"],
            ["lse2_ptr", "delta_ptr"],
            ["scale", "factor"],
            (*STRIDES, "g_t", "g_h"),
            counts=COUNTS[:3],
        ),
        {"HEADS": 4, "RAGGED": False}
        | {k: v for k, v in kept.items() if k not in ("GROUP", *WINDOWED)},
        config.warps,
        config.stages,
    )


WINDOWED = ("HAS_LEFT", "HAS_RIGHT")
DELTA = KernelVariant(
    "jagged_flash_attention_delta_kernel",
    dict.fromkeys(("out_ptr", "grad_out_ptr"), "*bf16")
    | dict.fromkeys(("lse_ptr", "grad_lse_ptr", "lse2_ptr", "delta_ptr"), "*fp32")
    | dict.fromkeys(("q_tokens", "stride_g_t", "stride_g_h", "stride_l_t", "stride_l_h"), "i32"),
    {
        "HEADS": 4,
        "VALUE_WIDTH": 96,
        "BLOCK_V": 128,
        "NATURAL": False,
        "BLOCK_T": 32,
        "HAS_GRAD_LSE": True,
    },
)


def test_attention_compiles():
    variants = [
        *(
            forward(case.width, case.dtype, windowed=case.windowed)
            if case.kernel == "forward"
            else backward(case.kernel, case.width, case.dtype, windowed=case.windowed)
            for case in COMPILED
        ),
        short(64, "bf16", 64),
    ]
    for report in compile_kernels(ATTENTION, variants) + compile_kernels(SOFTMAX, [DELTA]):
        product = "wgmma.mma_async" if report.capability == 90 else "tcgen05.mma"
        if report.variant is not DELTA:
            assert product in report.ptx
        # Spilled registers cost speed. Only wider heads and windows of the gradients of keys spill.
        if report.capability == 90 and not report.variant.constants.get("HAS_LEFT"):
            assert report.stack_bytes == 0, report.variant


def test_single_precision_compiles():
    variants = [
        forward(16, "fp32"),
        backward("backward_queries", 16, "fp32"),
        backward("backward_keys", 16, "fp32", windowed=True),
    ]
    for report in compile_kernels(ATTENTION, variants, capabilities=(90,)):
        # No TF32: products in full precision have no tensor core.
        assert "wgmma" not in report.ptx
        assert "mma.sync" not in report.ptx


def test_activations_compile():
    # One kernel with an activation a head holds them all.
    variants = [
        backward("backward_keys", 64, "bf16", activations=",".join(ACTIVATION_NAMES)),
        backward("backward_queries", 64, "bf16", activations="gelu"),
        forward(96, "fp16", windowed=True, activations="silu"),
    ]
    for report in compile_kernels(ATTENTION, variants):
        product = "wgmma.mma_async" if report.capability == 90 else "tcgen05.mma"
        assert product in report.ptx
        assert "tanh.approx" in report.ptx
        if report.capability == 90 and report.variant is variants[1]:
            assert report.stack_bytes == 0


POOLED = "gem_attention.kernels.pooled_attention.kernel"
POOLED_COUNTS = ("k_tokens", "batch", "seeds", "split")
POOLED_STRIDES = ("q_p", "q_h", "k_s", "k_h", "v_s", "v_h")


def pooled(kernel, width, dtype, rows, columns, *, stages=3, activations="softmax", ragged=False):
    """A kernel of pooled attention, its keys by TMA or by pointers."""
    tile = f"tensordesc<{dtype}[1,1,{columns},{width}]>" if ragged else f"*{dtype}"
    back = kernel == "backward"
    keys = ("k_ptr", "v_ptr", *(("grad_k_ptr", "grad_v_ptr") if back else ()))
    floats = ("lse_ptr", "part_ptr", *(() if back else ("part_top_ptr", "part_sum_ptr")))
    given = (
        dict.fromkeys(("seeds_ptr", "out_ptr", *(("grad_out_ptr",) if back else ())), f"*{dtype}")
        | dict.fromkeys(keys, tile)
        | dict.fromkeys(floats, "*fp32")
        | {name: kind for name, kind in LIST.items() if name != "q_offsets_ptr"}
        | dict.fromkeys(POOLED_COUNTS, "i32")
        | dict.fromkeys(("scale", "factor") if back else ("factor",), "fp32")
        | {f"stride_{name}": "i32" for name in POOLED_STRIDES}
    )
    config = LaunchConfig(rows, columns, 4, stages)
    kept = constants(
        *(width, dtype, False, config), rows="BLOCK_T", columns="BLOCK_S", activations=activations
    )
    kept = {name: value for name, value in kept.items() if name not in WINDOWED}
    return KernelVariant(
        f"pooled_attention_{kernel}_kernel",
        given,
        kept | {"KV_HEADS": 4, "GROUP": 1 if ragged else 2, "RAGGED": ragged},
        4,
        stages,
    )


def test_pooled_attention_compiles():
    merge = pooled("forward", 96, "fp16", 16, 64)
    without = ("seeds_ptr", "k_ptr", "v_ptr", "entries_ptr", "count_ptr", "factor")
    variants = [
        pooled("forward", 128, "bf16", 32, 64, ragged=True),
        pooled("backward", 128, "bf16", 32, 32, ragged=True),
        pooled("forward", 96, "fp16", 64, 64, activations="silu"),
        pooled("backward", 48, "bf16", 64, 64, stages=2, activations="gelu"),
        KernelVariant(
            "pooled_attention_merge_kernel",
            {
                name: kind
                for name, kind in merge.arguments.items()
                if name not in without and not name.startswith("stride")
            },
            {
                name: value
                for name, value in merge.constants.items()
                if name not in ("WIDTH", "BLOCK_K", "FAST", "BLOCK_S", "RAGGED", "STAGES")
            },
        ),
        KernelVariant(
            "pooled_attention_sum_kernel",
            {"part_ptr": "*fp32", "grad_seeds_ptr": "*bf16", "scale": "fp32"}
            | dict.fromkeys(("lanes", "rows"), "i32"),
            {"KV_HEADS": 4, "GROUP": 2, "WIDTH": 96, "BLOCK_L": 32, "BLOCK_E": 128},
        ),
    ]
    for report in compile_kernels(POOLED, variants):
        if report.variant.constants.get("RAGGED"):
            assert "cp.async.bulk.tensor" in report.ptx
            assert report.stack_bytes == 0, report.variant
        if "STAGES" in report.variant.constants:
            assert any(word in report.ptx for word in ("mma.sync", "wgmma", "tcgen05.mma"))


@pytest.mark.parametrize("sequences", [20, 20_000])
def test_tile_lists_compile(sequences):
    by_sorting = sequences > 16_384
    variant = KernelVariant(
        "_tile_list_kernel",
        {
            "tiled_ptr": "*i32",
            "other_ptr": "*i64",
            "starts_ptr": "*i64" if by_sorting else "*i32",
            "entries_ptr": "*i32",
            "count_ptr": "*i32",
            **dict.fromkeys(("tokens", "other_tokens", "batch", "span", "capacity"), "i32"),
        },
        {
            "BLOCK_TOKENS": 64,
            "DESCENDING": by_sorting,
            "HAS_STARTS": by_sorting,
            "BLOCK_B": 16,
            "BLOCK_C": 256,
            "BLOCK_M": 64,
        },
    )
    assert all(
        report.stack_bytes == 0
        for report in compile_kernels("gem_attention.tiling.kernel", [variant])
    )


def test_one_pass_backward_is_for_short_queries():
    assert short_rows(32 * 7, 7, width=128) == 32
    assert short_rows(64 * 7, 7, width=64) == 64
    assert short_rows(65 * 7, 7, width=64) == 0
    assert short_rows(32 * 7, 7, width=256) == 0
