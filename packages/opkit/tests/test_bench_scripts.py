"""Benchmark scripts: no case loses the others, whatever it does to its process."""

import json
import logging
import subprocess
import sys
import time

import pytest

from gem_opkit.bench import BenchCase
from gem_opkit.bench_scripts import main, note, read_journal, run_script, watch, work
from gem_opkit.ceilings import Ceilings
from gem_opkit.cost import Cost
from gem_opkit.errors import MeasurementError

CEILINGS = Ceilings("cpu", "fp32", copy_bytes_per_s=1e13, matmul_flops_per_s=1e15)


@pytest.fixture(autouse=True)
def small_machine(monkeypatch):
    monkeypatch.setattr("gem_opkit.timing._FLUSH_BYTES", 2**20)
    monkeypatch.setattr("gem_opkit.bench_scripts.measure_ceilings", lambda *_, **__: CEILINGS)


def pause():
    time.sleep(0.001)


def case(name, **changed):
    given = {"run": pause, "check": lambda: None, "cost": Cost(9, 9), "shapes": {}, **changed}
    return BenchCase(name=name, **given)


def group(name, **changed):
    return name, lambda: [case(f"{name}_forward", **changed), case(f"{name}_backward")]


def run_work(tmp_path, groups, device="cpu"):
    journal = tmp_path / "journal.jsonl"
    journal.touch()
    status = work("toy", groups, journal, device, tmp_path, 3)
    path = tmp_path / "cpu" / "toy.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return status, {row["case"]: row for row in rows}, read_journal(journal)


def fail(error):
    def check():
        raise error

    return check


def test_what_fails_is_named_and_the_others_are_measured(tmp_path, caplog):
    def unmade():
        raise MemoryError("too large")

    groups = [
        group("a"),
        group("wrong", check=fail(ValueError("differs"))),
        ("unmade", unmade),
        group("z"),
    ]
    status, rows, events = run_work(tmp_path, groups)
    assert status == 0
    # A gate stands for its group: the backward of a wrong forward is not timed either.
    assert list(rows) == ["a_forward", "a_backward", "z_forward", "z_backward"]
    failed = {event["group"]: event["who"] for event in events if event["step"] == "failed"}
    assert failed == {"wrong": "ValueError: differs", "unmade": "MemoryError: too large"}
    assert "wrong: FAILED" in caplog.text


def test_a_next_worker_goes_on_and_spares_a_peer(tmp_path):
    journal = tmp_path / "journal.jsonl"
    note(journal, "a", "done", "a")
    note(journal, "b", "skip", "hangs")
    groups = [group("a", check=fail(ValueError)), group("b", peers={"hangs": fail(SystemExit)})]
    status, rows, events = run_work(tmp_path, groups)
    assert status == 0 and list(rows) == ["b_forward", "b_backward"]
    assert rows["b_forward"]["failed_peers"]["hangs"].startswith("RuntimeError: took too long")
    assert events[-1] == {"group": "b", "step": "done", "who": "b"}


def test_a_lost_device_ends_the_worker_within_the_group(tmp_path, monkeypatch):
    monkeypatch.setattr("gem_opkit.bench_scripts._is_usable", lambda device: False)
    groups = [group("a", check=fail(RuntimeError("illegal access"))), group("b")]
    status, rows, events = run_work(tmp_path, groups)
    assert status != 0 and not rows
    # Whoever watches sees at which step it ended, and goes on behind it.
    assert events[-1] == {"group": "a", "step": "check", "who": "a_forward"}


def test_ceilings_are_measured_again_before_a_time_is_called_impossible(tmp_path, monkeypatch):
    better = Ceilings("cpu", "fp32", copy_bytes_per_s=1e15, matmul_flops_per_s=1e15)
    measured = iter([CEILINGS, CEILINGS, better, better])
    monkeypatch.setattr("gem_opkit.bench_scripts.measure_ceilings", lambda *_, **__: next(measured))
    fast, impossible = Cost(0, 10**11), Cost(0, 10**15)
    groups = [group("fast", cost=fast), group("impossible", cost=impossible)]
    status, rows, events = run_work(tmp_path, groups)
    assert status == 0 and list(rows) == ["fast_forward", "fast_backward"]
    assert MeasurementError.__name__ in events[-1]["who"]


# A worker that has no torch to import: "group" or "group:peer", and what happens there.
WORKER = """
import json, os, sys, time
journal = sys.argv[-1]
def note(group, step, who=""):
    with open(journal, "a") as file:
        file.write(json.dumps({"group": group, "step": step, "who": who}) + "\\n")
before = [json.loads(line) for line in open(journal)]
note("", "ready")
for word in sys.argv[1:-2]:
    group, _, rest = word.partition(":")
    peer, _, end = rest.partition("=")
    if any(e["group"] == group and e["step"] in ("done", "failed") for e in before):
        continue
    note(group, "check")
    if peer:
        note(group, "peer", peer)
    spared = any(e["group"] == group and e["step"] == "skip" for e in before)
    if not spared and end == "hang":
        time.sleep(60)
    if not spared and end == "crash":
        os.abort()
    note(group, "done")
    if end == "late":
        os.abort()
"""


def run_watch(tmp_path, words, limit_s=2.0, total_s=None):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    began = time.monotonic()
    failed = watch([sys.executable, str(script), *words], limit_s, total_s)
    return {event["group"]: event["who"] for event in failed}, time.monotonic() - began


def test_hangs_and_crashes_cost_their_group_alone(tmp_path, caplog):
    caplog.set_level(logging.INFO, "gem_opkit.bench")
    words = ["a", "b:=hang", "c:=crash", "d:slow=hang", "e:bad=crash", "f"]
    failed, seconds = run_watch(tmp_path, words)
    assert set(failed) == {"b", "c"}
    assert "took too long" in failed["b"] and "ended the process with status -" in failed["c"]
    # Peers are left out and their groups done without them.
    assert "4 done, 2 failed" in caplog.text
    assert "d: slow took too long, and is left out" in caplog.text
    assert seconds < 20


def test_time_for_everything_is_kept_to(tmp_path):
    failed, seconds = run_watch(tmp_path, ["a", "b:=hang", "c"], limit_s=60, total_s=1.0)
    assert failed == {"b": "time for all cases together is over"}
    assert seconds < 5


def test_a_worker_that_ends_between_groups_is_not_tried_for_ever(tmp_path):
    failed, _ = run_watch(tmp_path, ["a:=late", "b"])
    assert list(failed) == [""] and "between groups" in failed[""]


def test_command_line_of_a_script(tmp_path, monkeypatch):
    journal = tmp_path / "journal.jsonl"
    journal.touch()
    words = f"bench_toy.py --device cpu --out {tmp_path} --calls 3 --case b --worker {journal}"
    monkeypatch.setattr(sys, "argv", words.split())
    with pytest.raises(SystemExit) as ended:
        run_script("toy", lambda device: [group("a"), group("b")])
    assert ended.value.code == 0
    assert [event["group"] for event in read_journal(journal)][-1] == "b"
    assert "a_forward" not in (tmp_path / "cpu" / "toy.jsonl").read_text()


def test_scripts_of_a_folder_all_run(tmp_path, monkeypatch, caplog):
    for name in ("one", "two", "three"):
        (tmp_path / f"bench_{name}.py").touch()
    ran = []

    def run(command, check):
        ran.append(command[1:])
        return subprocess.CompletedProcess(command, "two" in command[1])

    monkeypatch.setattr("gem_opkit.bench_scripts.subprocess.run", run)
    monkeypatch.setattr(sys, "argv", ["bench_scripts", str(tmp_path), "--limit", "9"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1 and "not all measured: bench_two.py" in caplog.text
    assert ran == [
        [str(tmp_path / f"bench_{name}.py"), "--limit", "9"] for name in ("one", "three", "two")
    ]
    ran.clear()
    monkeypatch.setattr(sys, "argv", ["bench_scripts", str(tmp_path), "--only", "three", "one"])
    main()
    assert [command[0][-8:] for command in ran] == ["three.py", "h_one.py"]
