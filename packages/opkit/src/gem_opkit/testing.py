"""The test kit of all packages, and a pytest plugin: ``pytest -p gem_opkit.testing``.

Test files import everything from here: the length cases, the error budget and the eight fixed
checks. The plugin

- registers the markers of ``MARKERS`` and treats an unknown one as an error; a test whose need is
  not met is skipped (hardware) or deselected (data, extras), and any other skip fails;
- under ``GEM_REQUIRE_GPU=1`` fails every skip;
- sets ``TRITON_INTERPRET=1`` when no GPU is visible, before kernels are decorated;
- lets tests of several processes share a card: each gives its memory back, and one marked ``large``
  runs at a time;
- fills ``torch.empty`` called from our packages with NaN, and fixes the seeds of every test;
- turns warnings raised from our packages into errors, and ignores those of others.
"""

import importlib.metadata
import importlib.util
import os
import random
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from gem_opkit.budget import (
    CheckFailure,
    Run,
    check_budget,
    check_equal_up_to_rounding,
    check_run_budget,
    check_runs_equal,
    fresh,
    rounding_band,
    run_with_gradients,
    tensors_in,
    upstream_like,
)
from gem_opkit.checks import (
    check_compiles_whole,
    check_contract_json,
    check_reference_gradients,
    check_refuses,
    check_registration,
    check_torch_free,
    run_fresh,
    run_without_triton,
)
from gem_opkit.kernel_checks import (
    check_interpreted_kernel,
    check_kernel_on_gpu,
    count_launches,
)
from gem_opkit.poison import fill_with_poison, poisoned_empty
from gem_opkit.ragged import (
    LENGTH_CASES,
    ODD_WIDTHS,
    LengthCase,
    check_alone_equals_in_batch,
    check_ragged_edges,
    length_case_id,
    take_sequences,
)

__all__ = [
    "LENGTH_CASES",
    "MARKERS",
    "ODD_WIDTHS",
    "SEED",
    "CheckFailure",
    "LengthCase",
    "Run",
    "check_alone_equals_in_batch",
    "check_budget",
    "check_compiles_whole",
    "check_contract_json",
    "check_equal_up_to_rounding",
    "check_interpreted_kernel",
    "check_kernel_on_gpu",
    "check_ragged_edges",
    "check_reference_gradients",
    "check_refuses",
    "check_registration",
    "check_run_budget",
    "check_runs_equal",
    "check_torch_free",
    "count_launches",
    "fill_with_poison",
    "fresh",
    "length_case_id",
    "poisoned_empty",
    "ragged_lengths",
    "rounding_band",
    "run_fresh",
    "run_with_gradients",
    "run_without_triton",
    "take_sequences",
    "tensors_in",
    "upstream_like",
]

SEED = 20260


@dataclass(frozen=True, slots=True)
class Marker:
    """A marker of the repository's tests.

    Attributes:
        meaning: shown by ``pytest --markers``.
        is_met: whether a test with it can run here.
        otherwise: what happens to it where it cannot.
    """

    meaning: str
    is_met: Callable[[], bool]
    otherwise: Literal["skip", "deselect"] = "skip"


def _always() -> bool:
    return True


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _version_of(distribution: str) -> tuple[int, ...]:
    return tuple(int(part) for part in importlib.metadata.version(distribution).split(".")[:2])


MARKERS: dict[str, Marker] = {
    "gpu": Marker("needs a CUDA GPU", lambda: _gpus() >= 1),
    "gpu2": Marker("needs two CUDA GPUs", lambda: _gpus() >= 2),
    "interpreter": Marker(
        "runs a kernel in Triton's interpreter; where a GPU is visible the gpu test runs it",
        _interpreting,
    ),
    "memcheck": Marker("small run of a kernel, to be repeated under compute-sanitizer", _always),
    "large": Marker("needs more than 8 GiB of a GPU; runs one at a time on a machine", _always),
    "slow": Marker("takes more than a few seconds", _always),
    "kuairand": Marker(
        "needs the KuaiRand files; GEM_KUAIRAND names their folder",
        lambda: bool(os.environ.get("GEM_KUAIRAND")),
        "deselect",
    ),
    "torchrec": Marker("needs torchrec", lambda: _installed("torchrec"), "deselect"),
    "triton_ge_3_8": Marker(
        "needs Triton 3.8, the first whose interpreter knows dot_scaled",
        lambda: _installed("triton") and _version_of("triton") >= (3, 8),
        "deselect",
    ),
}


def pytest_configure(config: pytest.Config) -> None:
    """Register markers, filter warnings, and choose Triton's interpreter where no GPU is."""
    if _gpus() == 0:
        # Triton reads it when a function is decorated, its own ones at its import, so after
        # ``import torch`` is early enough, after the import of Dynamo or a FLOP counter not.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if config.option.log_level is None and not config.getini("log_level"):
        config.option.log_level = "INFO"  # torch's trace log fills pages below INFO
    for name, marker in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {marker.meaning}")
    # In front, so that the filters of a project still win: the last match decides.
    config.getini("filterwarnings")[:0] = [
        "ignore",
        "default::pytest.PytestWarning",
        "error::pytest.PytestUnknownMarkWarning",
        r"error:::gem(_\w+)?(\.|$)",
    ]
    if _installed("hypothesis"):
        _use_hypothesis_profile(config)


def _use_hypothesis_profile(config: pytest.Config) -> None:
    from hypothesis import settings

    # The same examples in every run, and no data base beside the sources.
    settings.register_profile(
        "gem", derandomize=True, database=None, deadline=None, max_examples=50
    )
    if not config.getoption("--hypothesis-profile", default=None):
        settings.load_profile("gem")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip or deselect the tests whose markers name a need that is not met."""
    unmet = {name: marker for name, marker in MARKERS.items() if not marker.is_met()}
    kept: list[pytest.Item] = []
    gone: list[pytest.Item] = []
    for item in items:
        lacking = [name for name in unmet if item.get_closest_marker(name)]
        if any(unmet[name].otherwise == "deselect" for name in lacking):
            gone.append(item)
            continue
        kept.append(item)
        if lacking:
            reason = "; ".join(unmet[name].meaning for name in lacking)
            item.add_marker(pytest.mark.skip(reason=reason))
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Share a card among processes: large tests one after another, and no memory kept."""
    with _one_at_a_time() if item.get_closest_marker("large") else nullcontext():
        try:
            return (yield)
        finally:
            if _gpus() and torch.cuda.is_initialized():
                # What torch keeps for later would be missing in the other workers of pytest-xdist.
                torch.cuda.empty_cache()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Wait for this user's other processes; where there is no fcntl (Windows), do not."""
    if not _installed("fcntl"):
        yield
        return
    import fcntl

    with (Path(tempfile.gettempdir()) / f"gem-large-tests-{os.getuid()}").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip that no marker explains, or any under GEM_REQUIRE_GPU=1, into a failure."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        unmet = [name for name, marker in MARKERS.items() if not marker.is_met()]
        explained = any(item.get_closest_marker(name) for name in unmet)
        _judge_skip(report, explained=explained)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn the skip of a whole file (importorskip and the like) into an error."""
    report = yield
    if report.skipped:
        _judge_skip(report, explained=False)
    return report


def _judge_skip(report: pytest.TestReport | pytest.CollectReport, *, explained: bool) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    if os.environ.get("GEM_REQUIRE_GPU") == "1":
        report.outcome = "failed"
        report.longrepr = f"skipped although GEM_REQUIRE_GPU=1: {reason}"
    elif not explained:
        report.outcome = "failed"
        needs = ", ".join(name for name, m in MARKERS.items() if m.is_met is not _always)
        report.longrepr = f"a skip needs a marker whose need is not met ({needs}): {reason}"


@pytest.fixture(autouse=True)
def gem_seed() -> int:
    """Seed torch, numpy and random before every test; the value is returned."""
    random.seed(SEED)
    torch.manual_seed(SEED)
    if _installed("numpy"):
        import numpy as np

        np.random.seed(SEED)
    return SEED


@pytest.fixture(autouse=True)
def gem_poison() -> Iterator[None]:
    """Fill what our packages get from ``torch.empty`` and its kin with NaN."""
    with poisoned_empty("gem"):
        yield


def ragged_lengths(*, max_sequences: int = 6, max_length: int = 20) -> Any:
    """Make a hypothesis strategy for the lengths of a batch, empty things included.

    Args:
        max_sequences: most sequences; the fewest is 0.
        max_length: most tokens of one; the fewest is 0.

    Returns:
        a strategy that draws lists of ints.
    """
    from hypothesis import strategies

    lengths = strategies.integers(min_value=0, max_value=max_length)
    return strategies.lists(lengths, min_size=0, max_size=max_sequences)
