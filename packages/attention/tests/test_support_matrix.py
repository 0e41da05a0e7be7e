"""The README's support matrix is what the tests run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import support_matrix
from support_matrix import README, Case, feature_rows, matrix, places_of, readme_with, rows_of


def test_readme_shows_what_the_tests_run():
    assert README.read_text(encoding="utf-8") == readme_with(matrix()), (
        "write the matrix anew: python packages/attention/tests/support_matrix.py"
    )


def test_rows_gather_the_widths_that_have_the_same_patterns():
    cases = [
        Case(64, 64, ("bfloat16",), (None, None)),
        Case(64, 64, ("bfloat16",), (3, 4)),
        Case(128, 48, ("bfloat16", "float16"), (None, 0)),
        Case(96, 96, ("bfloat16",), (None, 0)),
        Case(96, 96, ("bfloat16",), (None, 0)),
    ]
    assert rows_of("A", "plain", cases, "run") == [
        "| A | plain | bf16 | 128/48, 96 | causal | run |",
        "| A | plain | bf16 | 64 | full, window | run |",
        "| A | plain | fp16 | 128/48 | causal | run |",
    ]


def test_places_follow_the_marks():
    tests = support_matrix.loaded("test_jagged_flash_attention")
    assert places_of(tests.test_kernel_on_gpu) == {"gpu"}
    assert places_of(tests.test_interpreted_kernel) == {"interpreter"}
    assert places_of(tests.test_strided_operands) == {"reference", "interpreter"}
    assert places_of(tests.test_gradient_of_the_logsumexp_alone) == {"reference"}
    assert places_of(tests.test_compiles_whole) == {"reference", "interpreter"}


def test_features_name_tests_that_exist():
    rows = dict(row[2:].split(" | ", 1) for row in feature_rows())
    assert rows["more than 2^31 elements"] == "| | yes |"
    assert rows["negative and zero scale"] == "yes | yes | |"
