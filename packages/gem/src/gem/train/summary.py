"""`summary.json`: what a finished run reached, how fast, and in how much memory."""

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch

SUMMARY_FILE = "summary.json"


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this process has held.

    Args:
        device: CUDA: memory that torch allocated on it; otherwise the resident set.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def throughput(
    *, examples: int, tokens: int, seconds: float, step_ms: float | None, data_wait_s: float
) -> dict[str, float | None]:
    """The ``throughput`` table of ``summary.json``.

    Args:
        examples: trained on by this process and its peers.
        tokens: their history events.
        seconds: time of the training loop, with its logs and checkpoints.
        step_ms: median time of a step.
        data_wait_s: time that steps waited for their batch.

    Returns:
        ``{examples_per_s, tokens_per_s, step_ms_median, data_wait_frac}``, null without a step.
    """
    timed = seconds > 0.0
    return {
        "examples_per_s": examples / seconds if timed else None,
        "tokens_per_s": tokens / seconds if timed else None,
        "step_ms_median": step_ms,
        "data_wait_frac": data_wait_s / seconds if timed else None,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON such that the file is whole or not there.

    Args:
        path: the file.
        content: JSON values; a NaN is refused.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    partial.rename(path)
