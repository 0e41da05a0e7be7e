"""The pytest plugin, run on small test files of its own."""

import json
import sys

import pytest
import torch
from hypothesis import find, given

from gem_opkit.testing import (
    MARKERS,
    SEED,
    CheckFailure,
    ragged_lengths,
    run_fresh,
    run_without_triton,
    take_sequences,
)

pytest_plugins = ["pytester"]


@pytest.fixture
def run(pytester, monkeypatch):
    monkeypatch.delenv("GEM_REQUIRE_GPU", raising=False)

    def go(source, *options):
        pytester.makepyfile(source)
        return pytester.runpytest_inprocess("-p", "gem_opkit.testing", "-rs", *options)

    return go


def without_gpu(monkeypatch):
    monkeypatch.setattr("gem_opkit.testing._gpus", lambda: 0)


ONE_GPU_TEST = """
import pytest
@pytest.mark.gpu
def test_kernel():
    pass
def test_plain():
    pass
"""


def test_gpu_test_is_skipped_where_no_gpu_is(run, monkeypatch):
    without_gpu(monkeypatch)
    result = run(ONE_GPU_TEST)
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*needs a CUDA GPU*"])


def test_gpu_test_runs_where_one_is(run, monkeypatch):
    monkeypatch.setattr("gem_opkit.testing._gpus", lambda: 1)
    run(ONE_GPU_TEST.replace("gpu\n", "gpu2\n")).assert_outcomes(passed=1, skipped=1)
    run(ONE_GPU_TEST).assert_outcomes(passed=2)


def test_skip_fails_where_a_gpu_is_required(run, monkeypatch):
    without_gpu(monkeypatch)
    monkeypatch.setenv("GEM_REQUIRE_GPU", "1")
    result = run(ONE_GPU_TEST)
    result.assert_outcomes(passed=1, errors=1)  # an error: the mark acts before the test body
    result.stdout.fnmatch_lines(["*skipped although GEM_REQUIRE_GPU=1*needs a CUDA GPU*"])


@pytest.mark.parametrize(
    "body",
    [
        "def test_x():\n    pytest.skip('no reason')",
        "@pytest.mark.skip(reason='later')\ndef test_x():\n    pass",
        "def test_x():\n    pytest.importorskip('no_such_module')",
        "@pytest.mark.parametrize('x', [])\ndef test_x(x):\n    pass",
    ],
)
def test_skip_without_a_marker_fails(run, body):
    result = run(f"import pytest\n{body}")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "skipped" not in result.parseoutcomes()
    result.stdout.fnmatch_lines(["*a skip needs a marker*"])


def test_skip_inside_a_test_whose_need_is_met_fails(run, monkeypatch):
    monkeypatch.setattr("gem_opkit.testing._gpus", lambda: 1)
    skipping = "import pytest\n@pytest.mark.gpu\ndef test_x():\n    pytest.skip('not today')"
    run(skipping).assert_outcomes(failed=1)
    run(skipping.replace("gpu", "slow")).assert_outcomes(failed=1)


def test_skip_of_a_whole_file_fails(run):
    result = run("import pytest\npytest.importorskip('no_such_module')\ndef test_x(): pass")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*a skip needs a marker*"])


def test_expected_failure_is_not_a_skip(run):
    result = run("import pytest\n@pytest.mark.xfail\ndef test_x():\n    assert False")
    result.assert_outcomes(xfailed=1)


def test_data_tests_are_deselected_until_their_folder_is_named(run, monkeypatch):
    source = "import pytest\n@pytest.mark.kuairand\ndef test_x():\n    pass"
    monkeypatch.delenv("GEM_KUAIRAND", raising=False)
    result = run(source)
    result.assert_outcomes(deselected=1)
    monkeypatch.setenv("GEM_KUAIRAND", "somewhere")
    run(source).assert_outcomes(passed=1)


def test_unknown_marker_is_an_error(run):
    result = run("import pytest\n@pytest.mark.gpus\ndef test_x():\n    pass")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*Unknown pytest.mark.gpus*"])


def test_kernel_tests_can_be_selected_for_compute_sanitizer(run, monkeypatch):
    monkeypatch.setattr("gem_opkit.testing._gpus", lambda: 1)
    source = ONE_GPU_TEST + "\n@pytest.mark.gpu\n@pytest.mark.memcheck\ndef test_odd(): pass"
    run(source, "-m", "memcheck").assert_outcomes(passed=1, deselected=2)


LARGE_TEST = """
import json, os, time
from pathlib import Path
import pytest
@pytest.mark.large
def test_large():
    began = time.monotonic()
    time.sleep(0.5)
    Path(f"{os.getpid()}.json").write_text(json.dumps([began, time.monotonic()]))
"""


def test_large_tests_of_two_processes_run_one_after_the_other(pytester, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(pytester.path))
    pytester.makepyfile(LARGE_TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "gem_opkit.testing"]
    processes = [pytester.popen(command) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    spans = sorted(json.loads(file.read_text()) for file in pytester.path.glob("*.json"))
    assert len(spans) == 2
    assert spans[0][1] <= spans[1][0]


def test_markers_are_documented(run):
    shown = run("", "--markers").stdout.str()
    for name, marker in MARKERS.items():
        assert f"@pytest.mark.{name}: {marker.meaning}" in shown


WARNING = """
import warnings
def warn(module):
    exec("import warnings\\nwarnings.warn('old')", {{"__name__": module}})
def test_x():
    warn({module!r})
"""


@pytest.mark.parametrize(
    ("module", "outcome"),
    [
        ("gem.train", {"failed": 1}),
        ("gem_jagged.batch", {"failed": 1}),
        ("gem_opkit", {"failed": 1}),
        ("gemmology", {"passed": 1}),
        ("torch.nn", {"passed": 1}),
    ],
)
def test_warning_from_our_packages_is_an_error(run, module, outcome):
    run(WARNING.format(module=module)).assert_outcomes(**outcome)


def test_seed_is_the_same_for_every_test(run):
    source = """
    import random, torch
    import numpy as np
    seen = []
    def draw():
        return float(torch.rand(())), random.random(), float(np.random.rand())
    def test_a(): seen.append(draw())
    def test_b(): seen.append(draw())
    def test_c(): assert seen[0] == seen[1]
    """
    run(source).assert_outcomes(passed=3)


def test_seed_fixture_tells_its_value(gem_seed):
    assert gem_seed == SEED
    first = torch.rand(3)
    torch.manual_seed(gem_seed)
    assert torch.equal(first, torch.rand(3))


def test_interpreter_is_chosen_where_no_gpu_is(run, monkeypatch):
    without_gpu(monkeypatch)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    run("import os\ndef test_x(): assert os.environ['TRITON_INTERPRET'] == '1'").assert_outcomes(
        passed=1
    )
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # a choice that was made is kept
    run("import os\ndef test_x(): assert os.environ['TRITON_INTERPRET'] == '0'").assert_outcomes(
        passed=1
    )


def test_fresh_process_runs_the_reference_path_without_triton():
    printed = run_without_triton(
        """
import sys, torch
from gem_opkit.cost import Cost, register_flops
from gem_opkit.dims import check_shapes
from gem_opkit.impl import resolve_impl
import gem_opkit.testing
@torch.library.custom_op("gem_fresh::double", mutates_args=())
def double(x_T: torch.Tensor) -> torch.Tensor:
    return x_T * 2
register_flops(double, lambda x_T: Cost(x_T.shape[0], 0))
x_T = torch.ones(3)
check_shapes("double", x_T=x_T)
print(resolve_impl("auto", x_T.device, "double", has_triton=True), float(double(x_T).sum()))
assert sys.modules["triton"] is None
"""
    )
    assert printed == "reference 6.0\n"


def test_fresh_process_cannot_import_what_is_blocked():
    with pytest.raises(CheckFailure, match="import of triton halted"):
        run_without_triton("import triton")
    assert run_fresh("print(2 + 2)") == "4\n"


def test_fresh_process_does_not_inherit_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run_fresh("import os; print(os.environ.get('TRITON_INTERPRET'))") == "None\n"


@given(ragged_lengths(max_sequences=3, max_length=4))
def test_ragged_lengths_stay_in_their_bounds(lengths):
    assert len(lengths) <= 3
    assert all(0 <= length <= 4 for length in lengths)


def test_ragged_lengths_reach_the_empty_things():
    strategy = ragged_lengths()
    assert find(strategy, lambda lengths: not lengths) == []
    assert find(strategy, lambda lengths: len(lengths) > 1 and not any(lengths)) == [0, 0]


def test_sequences_are_taken_in_the_wanted_order():
    packed = torch.arange(6.0, requires_grad=True)
    taken = take_sequences(packed, (1, 0, 3, 2), (3, 1, 0))
    assert taken.tolist() == [4.0, 5.0, 0.0]
    taken.sum().backward()
    assert packed.grad.tolist() == [1, 0, 0, 0, 1, 1]
    assert take_sequences(packed, (6,), ()).shape == (0,)
