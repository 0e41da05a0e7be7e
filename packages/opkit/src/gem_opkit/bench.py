"""Benchmarks: correct first, then timed, then one JSON row a case.

``run_bench`` runs every case's check before it times anything, so that no speed of a wrong kernel
is ever written. A time that beats the device's data sheet is an error, not a result.
Rows go to ``<out>/<device>/<name>.jsonl``, one a case, and carry commit, versions and shapes.
"""

import datetime
import importlib.metadata
import json
import logging
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from gem_opkit.budget import tensors_in
from gem_opkit.ceilings import (
    Ceilings,
    Peak,
    device_name,
    device_peak,
    measure_ceilings,
    share_of_ceiling,
    share_of_peak,
)
from gem_opkit.cost import Cost
from gem_opkit.errors import ConfigError, refusal
from gem_opkit.timing import Timing, time_in_turn, wait_for

_log = logging.getLogger("gem_opkit.bench")


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One row of a benchmark.

    Attributes:
        name: unique within the benchmark.
        run: the call that is timed.
        check: the gate; raises if ``run`` computes anything wrong (``check_budget`` and kin).
        cost: FLOPs and fewest bytes of the call, on one GPU where several work together.
        shapes: what a reader needs to repeat it: lengths, widths, heads; JSON values.
        dtype: number format of the inputs.
        peers: name -> the same work done by someone else, timed in turn with it; in 8 bits none.
        fp8_flops: how many of the cost's FLOPs ``run`` does on FP8 tensor cores, whose peak is
            higher; each part counts against the peak of its own format.
    """

    name: str
    run: Callable[[], Any]
    check: Callable[[], Any]
    cost: Cost
    shapes: Mapping[str, Any]
    dtype: str = "fp32"
    peers: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    fp8_flops: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.fp8_flops <= self.cost.flops:
            raise ConfigError(
                refusal(
                    "BenchCase",
                    "fp8_flops",
                    must=f"be from 0 to the {self.cost.flops} FLOPs of the cost",
                    got=self.fp8_flops,
                    fix="count the products that run in 8 bits",
                )
            )


def backward_of(fn: Callable[..., Any], inputs: Sequence[Any]) -> Callable[[], Any]:
    """Run a function forward once and return a call that repeats only its backward.

    Args:
        fn: operator or module.
        inputs: positional arguments; at least one tensor requires a gradient.

    Returns:
        a call for ``BenchCase.run``; it returns the gradients.

    Raises:
        ConfigError: no input requires a gradient.
    """
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    if not leaves:
        raise ConfigError(
            refusal(
                "backward_of",
                "inputs",
                must="hold a tensor that requires a gradient",
                got="none",
                fix="mark it with requires_grad=True",
            )
        )
    roots = [out for out in tensors_in(fn(*inputs)) if out.requires_grad]
    # Drawn where they are used: a host takes longer for a large output than all that is timed.
    upstream = [torch.randn_like(root) for root in roots]

    def backward() -> Any:
        return torch.autograd.grad(roots, leaves, upstream, retain_graph=True, allow_unused=True)

    return backward


def run_bench(
    name: str,
    cases: Sequence[BenchCase],
    *,
    device: Any = "cpu",
    gpus: int = 1,
    out: Path | str | None = "results",
    calls: int = 20,
    ceilings: Ceilings | None = None,
    at: Callable[[str, str], None] = lambda step, who: None,
) -> list[dict[str, Any]]:
    """Check every case, time it and its peers in turn, and write one JSON row a case.

    A row of an earlier run is replaced where the case has the same name, and kept otherwise. A peer
    whose first call raises is left out and named in the row (``failed_peers``).

    Args:
        name: of the benchmark, and of its file.
        cases: what to run, with unique names.
        device: where it works.
        gpus: number of GPUs that work together; part of the folder's name.
        out: folder of the results; None writes nothing.
        calls: timed calls of each case and of each peer.
        ceilings: of this device; where not given, measured before and after.
        at: called before each step with its kind, ``"check"``, ``"peer"`` (its first call) or
            ``"time"``, and the name of the case or of the peer.

    Returns:
        the rows.

    Raises:
        ConfigError: no case, or two of one name.
        MeasurementError: a time beats the peak or the ceiling. Nothing is written then.
        Exception: whatever a case's check raises. Nothing is timed or written then.
    """
    names = [case.name for case in cases]
    if not cases or len(set(names)) != len(names):
        raise ConfigError(
            refusal(
                "run_bench",
                "cases",
                must="be at least one, with unique names",
                got=names,
                fix="name each case after its shapes",
            )
        )
    for case in cases:
        at("check", case.name)
        case.check()
    given = ceilings
    if given is None:
        measure_ceilings(device)
    timings, failures = [], []
    for case in cases:
        peers, failed = _peers_that_run(case, device, at)
        at("time", case.name)
        timings.append(time_in_turn({"": case.run, **peers}, device=device, calls=calls))
        failures.append(failed)
    # Measured before and after, the better of both: a machine that was busy for a moment must
    # not make a right time look impossible.
    ceilings = given or measure_ceilings(device, again=True)
    peak = device_peak(device_name(device))
    origin = provenance()
    rows = []
    for case, timing, failed in zip(cases, timings, failures, strict=True):
        costs = dict.fromkeys(timing, case.cost)
        costs[""] = _in_bf16(case.cost, case.fp8_flops, peak)
        shares = {who: _judged(t, costs[who], ceilings, peak) for who, t in timing.items()}
        own = shares.pop("")
        row = {
            "bench": name,
            "case": case.name,
            "device": device_name(device),
            "gpus": gpus,
            "dtype": case.dtype,
            "shapes": dict(case.shapes),
            "flops": case.cost.flops,
            "bytes": case.cost.bytes,
            **({"fp8_flops": case.fp8_flops} if case.fp8_flops else {}),
            **own,
            "peers": shares,
            **({"failed_peers": failed} if failed else {}),
            "peak_source": _source(peak, case.fp8_flops),
            "ceilings": asdict(ceilings),
            **origin,
        }
        _log.info(
            "%s: %.4g ms, %.1f %% of the ceiling", case.name, row["ms"], 1e2 * row["ceiling_frac"]
        )
        rows.append(row)
    if out is not None:
        folder = Path(out) / device_folder(device_name(device), gpus=gpus)
        write_rows(folder / f"{name}.jsonl", rows)
    return rows


def _peers_that_run(
    case: BenchCase, device: Any, at: Callable[[str, str], None]
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Call every peer once; return those that run, and why the others do not."""
    peers, failed = {}, {}
    for who, call in case.peers.items():
        at("peer", who)
        try:
            call()
            wait_for(device)
        except Exception as error:  # noqa: BLE001 - other people's code, and the row says it
            wait_for(device)  # raises where the peer has killed the device for everybody
            failed[who] = f"{type(error).__name__}: {error}".splitlines()[0]
            _log.warning("%s: %s is left out, %s", case.name, who, failed[who])
        else:
            peers[who] = call
    return peers, failed


def _in_bf16(cost: Cost, fp8_flops: int, peak: Peak) -> Cost:
    """Return a cost with 8-bit FLOPs as the bf16 FLOPs that take as long at the peaks of both.

    So that a share of the peak is the time at both peaks, one product after the other, over the
    time taken. The measured ceiling is bf16's; that of 8 bits is taken to be as much higher as on
    the data sheet.
    """
    saved = fp8_flops - round(fp8_flops / peak.fp8_over_bf16)
    return Cost(cost.flops - saved, cost.bytes)


def _source(peak: Peak, fp8_flops: int) -> str:
    if not fp8_flops or peak.flops_per_s is None:
        return peak.peak_source
    return f"{peak.peak_source}; FP8 {peak.fp8_over_bf16:g} times that"


def _judged(timing: Timing, cost: Cost, ceilings: Ceilings, peak: Peak) -> dict[str, Any]:
    return {
        **asdict(timing),
        "peak_frac": share_of_peak(cost.flops, timing.ms, peak.flops_per_s),
        "ceiling_frac": share_of_ceiling(cost, timing.ms, ceilings),
    }


def device_folder(name: str, *, gpus: int = 1) -> str:
    """Return the folder of a device under ``results``.

    Args:
        name: as ``device_name`` gives it.
        gpus: number of GPUs that work together, at least 1.

    Returns:
        ``cpu``, ``h200``, ``h200x2``: lower case, without the vendor, words joined by hyphens.
    """
    stem = re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia ")).strip("-")
    return f"{stem}x{gpus}" if gpus > 1 else stem


def provenance() -> dict[str, Any]:
    """Say what a row of results was measured with.

    Returns:
        ``commit`` (with ``+dirty`` where tracked files differ from it; None outside a checkout;
        the variable GEM_COMMIT wins), ``versions`` of Python, torch, triton and every package of
        ours that is loaded, and ``measured_at``, UTC.
    """
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    try:
        versions["triton"] = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        versions["triton"] = None
    for module_name, module in sorted(sys.modules.items()):
        if re.fullmatch(r"gem(_\w+)?", module_name) and hasattr(module, "__version__"):
            versions[module_name] = module.__version__
    return {
        "commit": _commit(),
        "versions": versions,
        "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _commit() -> str | None:
    """Return the commit, with ``+dirty`` where files differ from it; None outside a checkout.

    Rows that an earlier benchmark wrote into ``results`` change nothing that is measured.
    """
    given = os.environ.get("GEM_COMMIT")  # for a machine that has the files but not .git
    if given:
        return given
    answers = []
    status = ["git", "status", "--porcelain", "-uno", "--", ":/", ":(top,exclude)results"]
    for command in (["git", "rev-parse", "HEAD"], status):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        if done.returncode != 0:
            return None
        answers.append(done.stdout.strip())
    return answers[0] + ("+dirty" if answers[1] else "")


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add rows to a file of results, one JSON object a line; a row replaces an older of its case.

    Args:
        path: the file, by convention ``results/<device>/<bench>.jsonl``; made where it is absent.
        rows: each with a ``case`` that names it within the file.
    """
    replaced = {row["case"] for row in rows}
    kept: list[Mapping[str, Any]] = []
    if path.exists():
        old = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
        kept = [row for row in old if row["case"] not in replaced]
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, sort_keys=False) for row in [*kept, *rows]]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
