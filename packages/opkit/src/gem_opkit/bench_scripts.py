"""Benchmark scripts of which no case loses the others: one process works, another watches it.

``run_script`` is the command line of a script whose cases come in groups. A group that fails, that
hangs or that kills its process is named, and the next one goes on, in a new process where it must;
a peer that does so is left out and its group is measured without it. Rows are written group by
group. ``python -m gem_opkit.bench_scripts FOLDER`` runs all such scripts of a folder.
"""

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gem_opkit.bench import BenchCase, run_bench
from gem_opkit.ceilings import Ceilings, measure_ceilings
from gem_opkit.errors import MeasurementError
from gem_opkit.timing import wait_for

_log = logging.getLogger("gem_opkit.bench")

# A name, and how the cases are made: a gate of one row may stand for all rows of its group.
Group = tuple[str, Callable[[], Sequence[BenchCase]]]
Event = Mapping[str, str]

_POLL_S = 0.05
# Imports, and the ceilings of the device.
_START_S = 120.0
# Of a worker that leaves because its device is lost to it.
_LOST_DEVICE = 3


def run_script(name: str, groups_of: Callable[[str], Iterable[Group]]) -> None:
    """Be the command line of a benchmark script: parse, run every group, report, and exit.

    Args:
        name: of the benchmark, and of its file of results.
        groups_of: device -> groups of cases. The groups are made one after the other, and what they
            hold is dropped before the next.

    Raises:
        SystemExit: always; with a status other than 0 where a group failed or time ran out.
    """
    parser = argparse.ArgumentParser(description=f"Time {name} and its peers.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--calls", type=int, default=20, help="timed calls of each who is compared")
    parser.add_argument("--case", default="", help="only groups whose name has this in it")
    parser.add_argument(
        "--limit",
        type=float,
        default=300.0,
        help="seconds that a step of a case may take: making it, its check, the first call of a "
        "peer (which may compile), or the timing",
    )
    parser.add_argument("--total", type=float, default=None, help="seconds for all cases together")
    parser.add_argument("--worker", type=Path, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if given.worker is None:
        sys.exit(1 if watch([sys.executable, *sys.argv], given.limit, given.total) else 0)
    groups = (group for group in groups_of(given.device) if given.case in group[0])
    sys.exit(work(name, groups, given.worker, given.device, given.out, given.calls))


def work(
    name: str, groups: Iterable[Group], journal: Path, device: str, out: Path | None, calls: int
) -> int:
    """Run the groups that the journal does not know yet, and write down every step.

    Args:
        name: of the benchmark.
        groups: what to run.
        journal: file of events, one JSON object a line; of the workers before, too.
        device: where the cases work.
        out: folder of the results; None writes none.
        calls: timed calls of each who is compared.

    Returns:
        status of the process: 0, or that of a lost device, after which a new process must go on.
    """
    before = read_journal(journal)
    ended = {event["group"] for event in before if event["step"] in ("done", "failed")}
    measure_ceilings(device)
    ceilings = measure_ceilings(device, again=True)
    note(journal, "", "ready", "")
    for group, make in groups:
        if group in ended:
            continue
        skip = {e["who"] for e in before if e["step"] == "skip" and e["group"] == group}
        try:
            note(journal, group, "make", group)
            began = time.perf_counter()
            options: dict[str, Any] = {"device": device, "out": out, "calls": calls}

            def at(step: str, who: str, group: str = group) -> None:
                note(journal, group, step, who)

            ceilings = _run(name, make, skip, ceilings, options | {"at": at})
        except Exception as error:  # noqa: BLE001 - it is logged, and the other groups go on
            if not _is_usable(device):
                return _LOST_DEVICE
            note(journal, group, "failed", f"{type(error).__name__}: {error}")
            _log.exception("%s: FAILED", group)
        else:
            note(journal, group, "done", group)
            _log.info("%s: done in %.1f s", group, time.perf_counter() - began)
        if torch.device(device).type == "cuda":
            torch.cuda.empty_cache()
    return 0


def _without(case: BenchCase, names: Collection[str]) -> BenchCase:
    """Return a case whose row says of some peers that they ended a process."""

    def refuse() -> None:
        raise RuntimeError("took too long, or ended its process")

    return replace(
        case, peers={who: refuse if who in names else run for who, run in case.peers.items()}
    )


def _run(
    name: str,
    make: Callable[[], Sequence[BenchCase]],
    skip: Collection[str],
    ceilings: Ceilings,
    options: dict[str, Any],
) -> Ceilings:
    """Run a group; return the ceilings, which are measured again if a case beats them."""
    cases = [_without(case, skip) for case in make()]
    try:
        run_bench(name, cases, ceilings=ceilings, **options)
    except MeasurementError:
        # A machine that was busy for a moment must not make a right time look impossible.
        again = measure_ceilings(options["device"], again=True)
        if again == ceilings:
            raise
        run_bench(name, cases, ceilings=again, **options)
        return again
    return ceilings


def _is_usable(device: str) -> bool:
    """Tell whether a device still works: after an illegal access nothing does, in this process."""
    try:
        torch.zeros(1, device=device).add_(1).item()
        wait_for(device)
    except RuntimeError:
        return False
    return True


def watch(command: Sequence[str], limit_s: float, total_s: float | None = None) -> list[Event]:
    """Run workers until one comes to the end, and end those that hang.

    Args:
        command: of a worker, to which ``--worker JOURNAL`` is added.
        limit_s: seconds that one step may take.
        total_s: seconds for everything; None for no limit.

    Returns:
        the events of groups that failed, and one without a group where not all were tried.
    """
    began = time.monotonic()
    until = None if total_s is None else began + total_s
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal.jsonl"
        journal.touch()
        why = "failed"
        while why:
            known = len(read_journal(journal))
            status, late = _watch_one([*command, "--worker", str(journal)], journal, limit_s, until)
            events = read_journal(journal)
            why = _blame(journal, events, known, status, until, late=late)
        events = read_journal(journal)
    failed = [event for event in events if event["step"] == "failed"]
    done = sum(event["step"] == "done" for event in events)
    if not done and not failed:
        _log.warning("no case was asked for")
    _log.info("%d done, %d failed, %.0f s", done, len(failed), time.monotonic() - began)
    for event in failed:
        _log.error("%s: FAILED, %s", event["group"] or "the script", event["who"])
    return failed


def _watch_one(
    command: Sequence[str], journal: Path, limit_s: float, until: float | None
) -> tuple[int, bool]:
    """Run one worker; return its status, and whether it was ended."""
    process = subprocess.Popen(command)
    seen, since, allowed_s = journal.stat().st_size, time.monotonic(), max(limit_s, _START_S)
    try:
        while process.poll() is None:
            time.sleep(_POLL_S)
            now, size = time.monotonic(), journal.stat().st_size
            if size != seen:
                seen, since, allowed_s = size, now, limit_s
            if now - since > allowed_s or (until is not None and now > until):
                process.kill()
                process.wait()
                return process.returncode, True
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return process.returncode, False


def _blame(
    journal: Path, events: list[Event], known: int, status: int, until: float | None, *, late: bool
) -> str:
    """Write down who ended a worker; return why another is needed, or nothing."""
    if status == 0:
        return ""
    last = events[-1] if len(events) > known else None
    why = "took too long" if late else f"ended the process with status {status}"
    if until is not None and time.monotonic() > until:
        group = last["group"] if last and last["step"] not in ("done", "failed") else ""
        note(journal, group, "failed", "time for all cases together is over")
        return ""
    if last is None or last["step"] in ("ready", "done", "failed"):
        # Not in a group: another worker would end at the same place.
        note(journal, "", "failed", f"between groups, {why}")
        return ""
    if last["step"] == "peer":
        note(journal, last["group"], "skip", last["who"])
        _log.warning("%s: %s %s, and is left out", last["group"], last["who"], why)
    else:
        note(journal, last["group"], "failed", f"{last['step']} of {last['who']} {why}")
    return why


def note(journal: Path, group: str, step: str, who: str) -> None:
    """Add an event to a journal.

    Args:
        journal: the file.
        group: at work, or empty.
        step: ``ready``, ``make``, ``check``, ``peer``, ``time``, ``skip``, ``done`` or ``failed``.
        who: case or peer, or what went wrong.
    """
    with journal.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"group": group, "step": step, "who": who}) + "\n")


def read_journal(journal: Path) -> list[Event]:
    """Return the events of a journal, oldest first.

    Args:
        journal: the file; a line that a killed worker left unfinished is none.

    Returns:
        the events.
    """
    lines = journal.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def main() -> None:
    """Run the scripts of a folder, each to its end, and exit with 1 if one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m gem_opkit.bench_scripts",
        description="Run all benchmark scripts of a folder. Other arguments go to each script.",
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", help="stems without bench_, in the order to run")
    parser.add_argument("--total", type=float, default=None, help="seconds for all of them")
    given, others = parser.parse_known_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    until = None if given.total is None else time.monotonic() + given.total
    files = sorted(given.folder.glob("bench_*.py"))
    if given.only:
        files = [given.folder / f"bench_{stem}.py" for stem in given.only]
    bad = []
    for file in files:
        more = []
        if until is not None:
            left_s = until - time.monotonic()
            if left_s <= 0:
                bad.append(f"{file.name} (no time left)")
                continue
            more = ["--total", f"{left_s:.1f}"]
        _log.info("%s", file.stem)
        if subprocess.run([sys.executable, str(file), *others, *more], check=False).returncode:
            bad.append(file.name)
    if bad or not files:
        _log.error("not all measured: %s", ", ".join(bad) or f"no bench_*.py in {given.folder}")
        sys.exit(1)


if __name__ == "__main__":
    main()
