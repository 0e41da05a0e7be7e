"""`summary.json`: what a finished run reached, how fast, and in how much memory.

Loads no torch by itself, as a report reads what stands here.
"""

import json
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gem.train.whole_file import write_whole

if TYPE_CHECKING:
    import torch

SUMMARY_FILE = "summary.json"
DIAGNOSTICS_FILE = "diagnostics.json"
# What the process that trained measured, and where it ran.
_COSTS = ("world_size", "device", "throughput", "efficiency", "memory")


def peak_memory_bytes(device: "torch.device") -> int:
    """The most memory that this process has held.

    Args:
        device: CUDA: memory that torch allocated on it; otherwise the resident set.
    """
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def throughput(
    *, examples: int, tokens: int, seconds: float, step_ms: float | None, data_wait_s: float
) -> dict[str, float | None]:
    """The ``throughput`` table of ``summary.json``.

    Args:
        examples: trained on by this process and its peers; 0: nothing was timed.
        tokens: their history events.
        seconds: time of the training loop, with its logs and checkpoints.
        step_ms: median time of a step.
        data_wait_s: time that steps waited for their batch.

    Returns:
        ``{examples_per_s, tokens_per_s, step_ms_median, data_wait_frac}``, null without a step.
    """
    timed = examples > 0 and seconds > 0.0
    return {
        "examples_per_s": examples / seconds if timed else None,
        "tokens_per_s": tokens / seconds if timed else None,
        "step_ms_median": step_ms,
        "data_wait_frac": data_wait_s / seconds if timed else None,
    }


def costs_of_training(folder: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a finished run has written about its speed and memory.

    For a process that continued the run without a step of its own: it cannot measure them.

    Args:
        folder: of the run.
        summary: what this process would write.

    Returns:
        The tables to take over; empty where the run has left no summary at the same step.
    """
    path = folder / SUMMARY_FILE
    if not path.is_file():
        return {}
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # no JSON: nothing is known, and it is about to be replaced
        return {}
    if not isinstance(before, dict) or before.get("steps") != summary["steps"]:
        return {}
    return {key: before[key] for key in _COSTS if key in before}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON such that the file is whole or not there.

    Args:
        path: the file.
        content: JSON values; a NaN is refused.
    """
    write_whole(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
