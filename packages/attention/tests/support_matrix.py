"""What ``jagged_flash_attention`` is tested with, and where: the tests take their cases from here.

``python packages/attention/tests/support_matrix.py`` writes the matrix of the README anew, from
these cases and from the marks of the tests themselves; a test holds the README to it.
"""

import importlib.util
import inspect
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).parent
README = TESTS.parent / "README.md"
BEGIN, END = "<!-- support matrix: written by tests/support_matrix.py -->", "<!-- end -->"
Window = tuple[int | None, int | None]
FULL, CAUSAL = (None, None), (None, 0)


@dataclass(frozen=True, slots=True)
class Case:
    """Widths, dtypes and a window that a test runs.

    Attributes:
        width: head width of queries and keys.
        value_width: head width of values.
        dtypes: names of them.
        window: keys visible left and right.
    """

    width: int
    value_width: int
    dtypes: tuple[str, ...]
    window: Window

    @property
    def id(self) -> str:
        """What pytest shows."""
        return f"{self.width}x{self.value_width}-{self.window}".replace(" ", "")


@dataclass(frozen=True, slots=True)
class ActivationCase:
    """A case of attention without softmax.

    Attributes:
        width: as in ``Case``.
        value_width: as in ``Case``.
        dtypes: as in ``Case``.
        window: as in ``Case``.
        activation: name of the activation, or one a head.
    """

    width: int
    value_width: int
    dtypes: tuple[str, ...]
    window: Window
    activation: str | tuple[str, ...]

    @property
    def id(self) -> str:
        """What pytest shows."""
        name = self.activation if isinstance(self.activation, str) else "+".join(self.activation)
        return f"{self.width}-{self.window}-{name}".replace(" ", "")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel of the plain ones that is compiled without a GPU, for sm_90 and sm_100.

    Attributes:
        kernel: which one.
        width: head width.
        dtype: name of it.
        windowed: whether both sides of the window are bounded.
    """

    kernel: str
    width: int
    dtype: str
    windowed: bool = False


ALL = ("float32", "bfloat16", "float16")
HALVES = ("bfloat16", "float16")
# Unequal sides, so that a kernel which takes one for the other fails.
KERNEL_WINDOWS: list[Window] = [FULL, CAUSAL, (11, None), (40, 20)]
# test_kernel_on_gpu: each with the plain kernels and with those that the GPU is given.
PATTERN_CASES = [
    Case(width, width, ALL if width == 64 else ("bfloat16",), window)
    for window in KERNEL_WINDOWS
    for width in (64, 128)
]
# test_every_head_width_on_gpu. Compiling products of float32 takes long: once for a wide head.
WIDTH_CASES = [
    Case(
        width,
        value_width,
        (
            *(("float32",) if max(width, value_width) <= 96 or width == 192 else ()),
            "float16" if width == 48 else "bfloat16",
        ),
        (50, 3),
    )
    for width, value_width in (
        *((width, width) for width in (16, 24, 32, 48, 80, 96, 192, 256)),
        *((64, 128), (128, 48), (256, 16)),
    )
]
# test_sm90: the Hopper kernels by themselves.
HOPPER_WINDOWS: list[Window] = [FULL, CAUSAL, (128, 128), (3, 0), (None, 40), (70, None)]
HOPPER_PATTERNS = [Case(128, 128, ("bfloat16",), window) for window in HOPPER_WINDOWS]
# As they are, and with sequences long enough for three consumers.
HOPPER_WIDTHS = [
    Case(width, width, ("bfloat16", "float16"), window)
    for width in (64, 128)
    for window in (FULL, (100, 20))
]
# test_generalized_attention.test_kernel_on_gpu: as PATTERN_CASES.
ACTIVATION_CASES = [
    *(
        ActivationCase(128, 128, ("bfloat16",), FULL, name)
        for name in ("gelu", "fast_gelu", "taylor_gelu", "relu", "relu_squared", "leaky_relu")
    ),
    ActivationCase(128, 128, ("bfloat16", "float16"), FULL, "hard_swish"),
    ActivationCase(128, 128, ("bfloat16",), CAUSAL, "identity"),
    ActivationCase(64, 64, ALL, FULL, "silu"),
    ActivationCase(64, 64, HALVES, (40, 20), "gelu"),
    ActivationCase(128, 128, ("bfloat16",), (11, None), "silu"),
    # Different activations in one call: on Hopper forward alone.
    ActivationCase(64, 64, ALL, (40, 20), ("silu", "relu", "gelu", "gelu")),
    ActivationCase(128, 128, ("bfloat16",), (11, None), ("fast_gelu", "silu", "silu", "relu")),
]
# test_generalized_attention.test_every_head_width_on_gpu.
ACTIVATION_WIDTHS = [
    Case(16, 16, ("float32", "bfloat16"), (50, 3)),
    Case(48, 128, ("float32", "bfloat16"), (50, 3)),
    Case(80, 80, ("float32", "bfloat16"), (50, 3)),
    Case(256, 96, ("bfloat16",), (50, 3)),
]
# test_generalized_attention.test_interpreted_kernel.
ACTIVATIONS_INTERPRETED = [
    (("gelu", "fast_gelu"), FULL),
    (("silu", "taylor_gelu"), (40, 20)),
    (("leaky_relu", "relu_squared"), (11, None)),
    (("hard_swish", "relu"), CAUSAL),
    ("identity", FULL),
]
# test_pooled_attention.test_kernel_on_gpu: seeds, query heads, key heads, and the case. One tile of
# seeds, two, more than the backward holds; a group of heads below each other.
POOLED_CASES = [
    (1, 2, 2, Case(64, 64, ("float32",), FULL)),
    (16, 4, 4, Case(128, 128, ("bfloat16",), FULL)),
    (32, 4, 4, Case(128, 128, ("bfloat16",), FULL)),
    (30, 4, 2, Case(64, 64, ("float16",), FULL)),
    (64, 4, 4, Case(128, 128, ("bfloat16",), FULL)),
    (100, 4, 4, Case(64, 64, ("bfloat16",), FULL)),
    (256, 4, 4, Case(128, 128, ("bfloat16",), FULL)),
]
# test_pooled_attention_on_gpu.test_every_head_width_on_gpu.
POOLED_WIDTHS = [
    Case(width, value_width, ("bfloat16", "float32") if width == 24 else ("bfloat16",), FULL)
    for width, value_width in (
        *((width, width) for width in (16, 24, 32, 48, 80, 96, 192, 256)),
        *((64, 128), (128, 48), (256, 16)),
    )
]
# test_block_attention.test_kernel_on_gpu: tokens of a block, heads, key heads, rotation, case.
BLOCK_CASES = [
    *(
        (tokens, 3, 3, rotary, Case(128, 128, ("bfloat16",), FULL))
        for tokens in (32, 64, 128)
        for rotary in ("none", "rote")
    ),
    (64, 4, 2, "position", Case(128, 128, ("bfloat16",), FULL)),
    (64, 2, 2, "rote", Case(64, 64, ALL, FULL)),
    (128, 2, 1, "position", Case(64, 64, HALVES, FULL)),
    (128, 2, 1, "position", Case(16, 16, ("float32",), FULL)),
    (100, 2, 2, "none", Case(64, 64, ("float16",), FULL)),
    (5, 2, 2, "rote", Case(64, 64, ("bfloat16",), FULL)),
]
# test_sm90_blocks.test_right_at_the_edges_of_blocks, by tokens of a block.
HOPPER_BLOCKS = [
    (tokens, Case(width, width, (dtype,), FULL))
    for width, dtype in ((128, "bfloat16"), (64, "float16"))
    for tokens in (128, 65)
]
# test_block_attention_on_gpu.test_every_head_width_on_gpu.
BLOCK_WIDTHS = [
    Case(width, value_width, ("bfloat16", "float32") if width in (24, 96) else HALVES[:1], FULL)
    for width, value_width in (
        *((width, width) for width in (16, 24, 32, 48, 80, 96, 192, 256)),
        *((64, 128), (128, 48)),
    )
]
# test_block_attention.test_interpreted_kernel: tokens of a block, key heads of 2, rotation, case.
BLOCK_INTERPRETED = [
    (64, 2, "none", Case(24, 24, ("float32",), FULL)),
    (64, 1, "rote", Case(48, 16, ("float32",), FULL)),
    # Blocks of 128 read float32 in chunks of 16 columns.
    (128, 1, "rote", Case(40, 40, ("float32",), FULL)),
    (32, 2, "position", Case(16, 16, ("float32",), FULL)),
]
# test_compiles.
COMPILED = [
    Compiled("forward", 128, "bf16"),
    Compiled("forward", 48, "fp16", windowed=True),
    Compiled("backward_queries", 64, "bf16", windowed=True),
    Compiled("backward_keys", 64, "bf16"),
    Compiled("backward_keys", 48, "fp16", windowed=True),
]
# test_every_head_width, in the interpreter too.
INTERPRETED_WIDTHS = [16, 24, 32, 48, 64, 80, 96, 128, 192, 256]

# feature -> the tests that hold it; where a test runs is read off its marks.
FEATURES: dict[str, tuple[str, ...]] = {
    "queries and keys of different lengths": (
        "test_interpreted_kernel",
        "test_history_equals_the_oracle_in_every_pattern",
        "test_kernel_on_gpu",
    ),
    "grouped heads": (
        "test_interpreted_kernel",
        "test_cases_equal_the_masked_oracle",
        "test_kernel_on_gpu",
    ),
    "values of another width": (
        "test_values_may_have_another_width",
        "test_every_head_width_on_gpu",
    ),
    "empty sequences, empty batch": (
        "test_ragged_edges",
        "test_empty_batch_after_a_warm_call",
        "test_kernel_on_gpu",
    ),
    "rows behind the last offset": (
        "test_tokens_behind_the_last_sequence_get_nothing",
        "test_poison_and_tails_on_gpu",
    ),
    "queries that see no key": (
        "test_query_that_sees_no_key_gives_zero_and_no_gradient",
        "test_right_for_every_pattern",
    ),
    "logsumexp and its gradient": (
        "test_interpreted_kernel",
        "test_gradient_of_the_logsumexp_alone",
        "test_right_for_every_pattern",
    ),
    "scores near -12, -50 and -100": (
        "test_low_scores_with_lengths_that_no_tile_divides",
        "test_low_scores_on_gpu",
    ),
    "slices of a fused QKV, other strides": (
        "test_strided_operands",
        "test_equals_an_fp64_oracle",
        "test_equals_an_fp64_oracle_on_gpu",
        "test_reads_slices_of_a_fused_tensor_in_place",
    ),
    "negative and zero scale": ("test_any_scale",),
    "int32 and int64 offsets": ("test_int32_offsets_are_accepted", "test_right_for_every_pattern"),
    "more than 2^31 elements": ("test_more_than_two_to_the_31_elements",),
    "the same bits in ten runs, when asked": (
        "test_same_bits_in_ten_runs",
        "test_same_bits_in_ten_runs_on_gpu",
    ),
    "torch.compile(fullgraph=True), changing lengths": (
        "test_compiles_whole",
        "test_compiles_whole_over_changing_lengths",
    ),
    "CUDA graph replayed with other lengths": ("test_a_captured_graph_is_right_for_other_lengths",),
    "nothing waits for the device": ("test_nothing_waits_for_the_device",),
    "memory within 1.1 of operands and results, deterministic": (
        "test_memory_is_that_of_inputs_and_results",
    ),
    "flash_compat against an fp64 oracle": (
        "test_equals_an_fp64_oracle",
        "test_equals_an_fp64_oracle_on_gpu",
    ),
}
GENERALIZED_FEATURES: dict[str, tuple[str, ...]] = {
    "every activation, and one a head": ("test_interpreted_kernel", "test_kernel_on_gpu"),
    "value and slope on a dense grid": (
        "test_device_equals_the_reference_everywhere",
        "test_fast_forms_are_within_the_tanh_of_the_unit",
    ),
    "queries and keys of different lengths, grouped heads": (
        "test_cases_equal_the_masked_oracle",
        "test_interpreted_kernel",
        "test_kernel_on_gpu",
    ),
    "values of another width": (
        "test_values_may_have_another_width",
        "test_every_head_width_on_gpu",
    ),
    "negative and zero scale": ("test_any_scale",),
    "empty sequences, empty batch": ("test_ragged_edges", "test_kernel_on_gpu"),
    "rows behind the last offset": (
        "test_tokens_behind_the_last_sequence_get_nothing",
        "test_poison_and_tails_on_gpu",
    ),
    "scores near -100, -50, -12, 12 and 100": ("test_scores_far_from_zero_on_gpu",),
    "slices of a fused QKV, other strides, int64 offsets": (
        "test_strided_operands",
        "test_slices_of_a_fused_tensor_and_int64_offsets_on_gpu",
    ),
    "more than 2^31 elements": ("test_more_than_two_to_the_31_elements",),
    "the same bits in ten runs, when asked": (
        "test_same_bits_in_ten_runs",
        "test_same_bits_in_ten_runs_on_gpu",
    ),
    "torch.compile(fullgraph=True), changing lengths": (
        "test_compiles_whole",
        "test_compiles_whole_over_changing_lengths",
        "test_compiles_whole_on_gpu",
    ),
    "CUDA graph replayed with other lengths": ("test_a_captured_graph_is_right_for_other_lengths",),
    "nothing waits for the device": ("test_nothing_waits_for_the_device",),
    "memory within 1.1 of operands and results": ("test_memory_is_that_of_inputs_and_results",),
    "flash_compat against an fp64 oracle": (
        "test_equals_an_fp64_oracle",
        "test_equals_an_fp64_oracle_on_gpu",
    ),
}
_FILES = ("test_jagged_flash_attention", "test_flash_compat", "test_sm90")
_GENERALIZED_FILES = (
    "test_generalized_attention",
    "test_generalized_compat",
    "test_activations",
)
_POOLED_FILES = ("test_pooled_attention", "test_pooled_attention_on_gpu")
POOLED_FEATURES: dict[str, tuple[str, ...]] = {
    "softmax, every kind of activation, one a head": (
        "test_interpreted_kernel",
        "test_cases_equal_the_oracle",
        "test_kernel_on_gpu",
    ),
    "1 to 256 seeds, grouped heads": (
        "test_interpreted_kernel",
        "test_more_seeds_than_a_program_holds",
        "test_many_seeds_are_cut_and_still_right",
        "test_kernel_on_gpu",
    ),
    "values of another width": ("test_interpreted_kernel", "test_every_head_width_on_gpu"),
    "one giant among dwarfs, cut into chunks": (
        "test_ragged_edges",
        "test_kernel_equals_the_reference_on_random_lengths",
        "test_giant_among_dwarfs_on_gpu",
    ),
    "no seeds, no sequences, no keys": ("test_nothing_to_pool", "test_kernel_on_gpu"),
    "rows behind the last offset": (
        "test_tokens_behind_the_last_sequence_are_not_read",
        "test_poison_and_tails_on_gpu",
    ),
    "a sequence of NaN leaves the others alone": (
        "test_a_poisoned_sequence_leaves_the_others_alone",
        "test_poison_and_tails_on_gpu",
    ),
    "scores near -12, -50 and -100": (
        "test_low_scores_with_lengths_that_no_tile_divides",
        "test_low_scores_on_gpu",
    ),
    "slices of a fused tensor, other strides": ("test_strided_operands",),
    "negative and zero scale": ("test_any_scale",),
    "int32 and int64 offsets": ("test_int32_offsets_are_accepted",),
    "more than 2^31 elements": ("test_more_than_two_to_the_31_elements",),
    "the same bits in ten runs": (
        "test_same_bits_in_ten_runs",
        "test_same_bits_in_ten_runs_on_gpu",
    ),
    "torch.compile(fullgraph=True), changing lengths": ("test_compiles_whole",),
    "CUDA graph replayed with other lengths": ("test_a_captured_graph_is_right_for_other_lengths",),
    "nothing waits for the device": ("test_nothing_waits_for_the_device",),
    "memory within 1.1 of operands and results": ("test_memory_is_that_of_inputs_and_results",),
    "flash_compat.pooled_attention_varlen_func": ("test_varlen_call_is_the_operator",),
}
_BLOCK_FILES = ("test_block_attention", "test_block_attention_on_gpu")
BLOCK_FEATURES: dict[str, tuple[str, ...]] = {
    "blocks of 1 to 128 tokens, the last one partial": (
        "test_blocks_of_every_length_with_their_tails",
        "test_interpreted_kernel",
        "test_kernel_on_gpu",
    ),
    "blocks of more than 128 tokens": ("test_blocks_of_every_length_with_their_tails",),
    "rotation by place and by log gap inside": (
        "test_turning_inside_is_turning_before",
        "test_interpreted_kernel",
        "test_kernel_on_gpu",
    ),
    "grouped heads": ("test_interpreted_kernel", "test_kernel_on_gpu", "test_reference_gradients"),
    "values of another width": ("test_interpreted_kernel", "test_every_head_width_on_gpu"),
    "empty sequences, empty batch": ("test_ragged_edges", "test_kernel_on_gpu"),
    "rows behind the last offset": (
        "test_tokens_behind_the_last_sequence_get_nothing",
        "test_poison_and_tails_on_gpu",
    ),
    "a block of NaN leaves the others alone": (
        "test_a_poisoned_block_leaves_the_others_alone",
        "test_poison_and_tails_on_gpu",
    ),
    "scores near -12, -50 and -100": (
        "test_low_scores_with_lengths_that_no_block_divides",
        "test_low_scores_on_gpu",
    ),
    "slices of a fused QKV, other strides": (
        "test_strided_operands",
        "test_reads_slices_of_a_fused_tensor_in_place",
    ),
    "negative and zero scale": ("test_any_scale",),
    "int32 and int64 offsets": ("test_int32_offsets_are_accepted",),
    "more than 2^31 elements": ("test_more_than_two_to_the_31_elements",),
    "the same bits in ten runs": (
        "test_same_bits_in_ten_runs",
        "test_same_bits_in_ten_runs_on_gpu",
    ),
    "torch.compile(fullgraph=True), changing lengths": (
        "test_compiles_whole",
        "test_compiles_whole_on_gpu",
    ),
    "CUDA graph replayed with other lengths": ("test_a_captured_graph_is_right_for_other_lengths",),
    "nothing waits for the device": ("test_nothing_waits_for_the_device",),
    "memory within 1.1 of operands and results": ("test_memory_is_that_of_inputs_and_results",),
}
_SHORT = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}
_PLACES = ("reference", "interpreter", "gpu")


def pattern(window: Window) -> str:
    """Return the word for a window."""
    if window == FULL:
        return "full"
    if window == CAUSAL:
        return "causal"
    return "one-sided window" if None in window else "window"


def rows_of(
    place: str, kernels: str, cases: Iterable[Case | ActivationCase], state: str
) -> list[str]:
    """Return a table row for each dtype and set of patterns, with the widths that have them."""
    seen: dict[tuple[str, int, int], list[str]] = {}
    for case in cases:
        for dtype in case.dtypes:
            words = seen.setdefault((_SHORT[dtype], case.width, case.value_width), [])
            if pattern(case.window) not in words:
                words.append(pattern(case.window))
    order = ("full", "causal", "one-sided window", "window")
    widths: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (dtype, width, value_width), words in seen.items():
        text = str(width) if width == value_width else f"{width}/{value_width}"
        widths.setdefault((dtype, tuple(sorted(words, key=order.index))), []).append(text)
    return [
        f"| {place} | {kernels} | {dtype} | {', '.join(texts)} | {', '.join(words)} | {state} |"
        for (dtype, words), texts in sorted(widths.items())
    ]


def compiled_rows() -> list[str]:
    """Return a table row for each dtype that is only compiled for Blackwell."""
    rows = []
    for dtype in sorted({case.dtype for case in COMPILED}):
        mine = [case for case in COMPILED if case.dtype == dtype]
        parts = {(case.kernel.partition("_")[0], case.width) for case in mine}
        widths = ", ".join(f"{width} ({part})" for part, width in sorted(parts, reverse=True))
        words = ", ".join(
            word
            for word, windowed in (("full", False), ("window", True))
            if any(case.windowed == windowed for case in mine)
        )
        rows.append(
            f"| Blackwell, sm_100 | plain | {dtype} | {widths} | {words} | compiled, never run |"
        )
    return rows


def loaded(name: str) -> ModuleType:
    """Load a test file by its name, without pytest."""
    spec = importlib.util.spec_from_file_location(f"support_matrix_{name}", TESTS / f"{name}.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def places_of(test: object) -> set[str]:
    """Return where a test runs, from its marks, its parameters and the fixture ``impl``."""
    marks = list(getattr(test, "pytestmark", []))
    names = {mark.name for mark in marks}
    if "gpu" in names:
        return {"gpu"}
    if "interpreter" in names:
        return {"interpreter"}
    parameters = [p for mark in marks if mark.name == "parametrize" for p in mark.args[1]]
    inner = {mark.name for p in parameters for mark in getattr(p, "marks", ())}
    both = "impl" in inspect.signature(test).parameters if callable(test) else False
    fixture = both and not any("impl" in mark.args[0] for mark in marks if mark.args)
    return {"reference"} | ({"interpreter"} if "interpreter" in inner or fixture else set())


def feature_rows(
    features: dict[str, tuple[str, ...]] = FEATURES, files: tuple[str, ...] = _FILES
) -> list[str]:
    """Return a table row for each feature."""
    tests = {
        name: test
        for module in map(loaded, files)
        for name, test in vars(module).items()
        if name.startswith("test_")
    }
    rows = []
    for feature, names in features.items():
        places = set().union(*(places_of(tests[name]) for name in names))
        marks = " | ".join("yes" if place in places else "" for place in _PLACES)
        rows.append(f"| {feature} | {marks} |".replace("|  |", "| |").replace("|  |", "| |"))
    return rows


def on_hopper(cases: Iterable[ActivationCase]) -> list[ActivationCase]:
    """Return the cases that the Hopper kernels take, with the dtypes that they take."""
    return [
        replace(case, dtypes=tuple(name for name in case.dtypes if name in HALVES))
        for case in cases
        if isinstance(case.activation, str)
    ]


def in_blocks(rows: Iterable[str]) -> list[str]:
    """Return the rows with the word for blocks as their pattern."""
    return [row.replace("| full |", "| block |") for row in rows]


def matrix() -> str:
    """Return what stands between the two comments of the README."""
    interpreted = [
        *(Case(24, 24, ("float32",), window) for window in KERNEL_WINDOWS),
        *(Case(width, width, ("float32",), FULL) for width in INTERPRETED_WIDTHS),
    ]
    return "\n".join(
        (
            BEGIN,
            "",
            "| on | kernels | dtype | head widths (K/V) | patterns | state |",
            "| --- | --- | --- | --- | --- | --- |",
            *rows_of("H200, sm_90", "Hopper", [*HOPPER_PATTERNS, *HOPPER_WIDTHS], "run"),
            *rows_of("H200, sm_90", "plain", [*PATTERN_CASES, *WIDTH_CASES], "run"),
            *compiled_rows(),
            "| other GPUs | plain | fp32, bf16, fp16 | 1 to 256 | all | never tried |",
            *rows_of("CPU, interpreter", "plain", interpreted, "run"),
            "| CPU, and GPUs for what is not above | reference | fp64, fp32, bf16, fp16 | any "
            "| all | run |",
            "",
            "| feature | reference, CPU | plain kernels, interpreter | H200 |",
            "| --- | --- | --- | --- |",
            *feature_rows(),
            "",
            "`generalized_attention`:",
            "",
            "| on | kernels | dtype | head widths (K/V) | patterns | state |",
            "| --- | --- | --- | --- | --- | --- |",
            *rows_of("H200, sm_90", "Hopper", on_hopper(ACTIVATION_CASES), "run"),
            *rows_of("H200, sm_90", "plain", [*ACTIVATION_CASES, *ACTIVATION_WIDTHS], "run"),
            *rows_of(
                "CPU, interpreter",
                "plain",
                [Case(24, 24, ("float32",), window) for _, window in ACTIVATIONS_INTERPRETED],
                "run",
            ),
            "",
            "| feature | reference, CPU | plain kernels, interpreter | H200 |",
            "| --- | --- | --- | --- |",
            *feature_rows(GENERALIZED_FEATURES, _GENERALIZED_FILES),
            "",
            "`pooled_attention`; more seeds than 64 rows hold go to the kernels above, backward:",
            "",
            "| on | kernels | dtype | head widths (K/V) | patterns | state |",
            "| --- | --- | --- | --- | --- | --- |",
            *rows_of(
                "H200, sm_90",
                "plain",
                [*(case for *_, case in POOLED_CASES), *POOLED_WIDTHS],
                "run",
            ),
            *rows_of("CPU, interpreter", "plain", [Case(24, 20, ("float32",), FULL)], "run"),
            "",
            "| feature | reference, CPU | plain kernels, interpreter | H200 |",
            "| --- | --- | --- | --- |",
            *feature_rows(POOLED_FEATURES, _POOLED_FILES),
            "",
            "`block_attention`, whose pattern is the block; Hopper's kernels take those of more",
            "than 64 tokens:",
            "",
            "| on | kernels | dtype | head widths (K/V) | patterns | state |",
            "| --- | --- | --- | --- | --- | --- |",
            *in_blocks(
                rows_of("H200, sm_90", "Hopper", [case for _, case in HOPPER_BLOCKS], "run")
            ),
            *in_blocks(
                rows_of(
                    "H200, sm_90",
                    "plain",
                    [*(case for *_, case in BLOCK_CASES), *BLOCK_WIDTHS],
                    "run",
                )
            ),
            *in_blocks(
                rows_of("CPU, interpreter", "plain", [c for *_, c in BLOCK_INTERPRETED], "run")
            ),
            "",
            "| feature | reference, CPU | plain kernels, interpreter | H200 |",
            "| --- | --- | --- | --- |",
            *feature_rows(BLOCK_FEATURES, _BLOCK_FILES),
            "",
            END,
        )
    )


def readme_with(text: str) -> str:
    """Return the README with this text as its matrix."""
    readme = README.read_text(encoding="utf-8")
    found = re.search(f"{re.escape(BEGIN)}.*?{re.escape(END)}", readme, re.DOTALL)
    if found is None:
        raise ValueError(f"{README} has no place for the matrix: {BEGIN} ... {END}")
    return readme[: found.start()] + text + readme[found.end() :]


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    README.write_text(readme_with(matrix()), encoding="utf-8")
