"""Faults that need a process of their own: signals, ranks, full disks, permissions."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bad_inputs import RESUME, TRAIN, Forked, make_world, run

from gem.train.checkpoint import latest_complete

# Sends SIGINT to itself at the moment when a module is first looked for.
AT_IMPORT = """
import os, signal, sys
class Moment:
    def find_spec(self, name, path=None, target=None):
        if name == {moment!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Moment())
sys.argv = ["gem", *{words!r}]
from gem.__main__ import main
main()
"""


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    make_world(folder)
    return folder


@pytest.fixture
def world(sound, tmp_path, monkeypatch):
    """A copy of recipe, data set and run; the current folder."""
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def process(*words: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(words, capture_output=True, text=True, timeout=120, **options)


def one_line(done: subprocess.CompletedProcess, code: int = 2) -> str:
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("error: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    "moment", ["gem.cli", "typer", "pydantic", "torch", "torch.distributed", "gem.data.batch"]
)
def test_ctrl_c_amid_an_import_shows_no_traceback(world, moment):
    program = AT_IMPORT.format(moment=moment, words=TRAIN)
    done = process(sys.executable, "-c", program)
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "interrupted\n")
    assert not (world / "new").exists()


@pytest.fixture
def ctrl_c_is_heard():
    """A shell's background jobs, and so tests that are one of them, begin with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_is_heard")
def test_ctrl_c_that_comes_out_as_another_error_is_still_one(world, monkeypatch):
    """As where a library's import is cut short, and what it left fails later."""

    def broken(*_, **__):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)  # the signal may reach another thread first
        except KeyboardInterrupt:
            raise AttributeError("partially initialized module") from None

    monkeypatch.setattr("gem.config.load_recipe", broken)
    assert run(world, TRAIN) == (130, "", "interrupted\n")


def test_a_signal_that_a_shell_ignores_stays_ignored(world):
    done = process(
        *("sh", "-c", 'trap "" INT; exec "$0" "$@"'),
        *(
            sys.executable,
            "-c",
            AT_IMPORT.replace("signal.signal(", "(").format(
                moment="gem.config", words=("train", "nowhere")
            ),
        ),
    )
    assert "RECIPE must be a TOML file" in one_line(done)


def test_under_torchrun_the_line_is_said_once_and_stands_at_the_end(world):
    launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "gem")
    words = (*TRAIN, "--set", "train.batchsize=3")
    done = process(sys.executable, "-m", *launch, *words)
    line = "error: recipe.toml: unknown key 'train.batchsize'; did you mean 'train.batch_examples'?"
    assert done.returncode == 1
    assert done.stderr.startswith(line + "\n")
    assert "rank 1: " not in done.stderr
    assert done.stderr.count("Traceback") == 1  # the launcher's own, of its ChildFailedError
    *_, last, border = done.stderr.rstrip().splitlines()
    assert last.endswith(line) and set(border) == {"="}


def test_a_fault_of_one_rank_is_told_by_that_rank(world):
    """Rank 0 looks at the data first, and the other one waits for it."""
    shutil.rmtree("data/events/clicks")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    ranks = [Forked(world, TRAIN, {**shared, "RANK": str(rank)}).start() for rank in (0, 1)]
    code, _, err = ranks[0].outcome()
    assert (code, err.count("\n")) == (2, 1), err
    assert err.startswith("error: gem data: the data set must have Parquet files in data/events")
    ranks[1].process.join(1)
    ranks[1].process.terminate()  # as the launcher does
    code, _, err = ranks[1].outcome()
    assert code != 0
    assert "Traceback" not in err
    assert err == "" or err.startswith("error: rank 1: ")


# A run on a disk that is too small, then the same command with --resume on one that is not.
TWO_RUNS = """
import json, subprocess, sys, threading, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from bad_inputs import run
before, after, words = {before!r}, {after!r}, {words!r}
if before is None:
    import resource
    def fill_up():
        while not list(Path("disk").glob("run/checkpoints/step-*")):
            time.sleep(0.001)
        resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, resource.RLIM_INFINITY))
    threading.Thread(target=fill_up, daemon=True).start()
else:
    subprocess.run(before, check=True)
first = run(Path(), words)
kept = sorted(path.name for path in Path("disk/run/checkpoints").iterdir())
if after is None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
else:
    subprocess.run(after, check=True)
print(json.dumps([first, kept, run(Path(), (*words, "--resume"))]))
"""


def on_a_small_disk(place: str, size: int, words: tuple[str, ...]) -> list:
    """Outcome of both runs, and the checkpoints between them.

    The disk is a file system of its own where the system lets us mount one. Elsewhere it is a limit
    on the length of files, which the kernel enforces at the same place, the write.
    """
    mount = ["mount", "-t", "tmpfs", "-o"]
    own = ["unshare", "--map-root-user", "--mount"]
    can = subprocess.run([*own, *mount, "size=64k", "none", place], capture_output=True)
    settings: dict = {"before": None, "after": None, "size": size // 4}
    if can.returncode == 0:
        settings["before"] = [*mount, f"size={size}", "none", place]
        settings["after"] = ["mount", "-o", "remount,size=64m", place]
    tests = str(Path(__file__).parent)
    program = TWO_RUNS.format(**settings, tests=tests, words=words)
    done = process(*(own if can.returncode == 0 else []), sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_disk_that_fills_up_costs_nothing_but_the_newest_checkpoint(world):
    Path("disk").mkdir()
    one = sum(path.stat().st_size for path in Path("run").rglob("*") if path.is_file())
    words = (*TRAIN[:-1], "disk/run", "--json", "--set", "train.passes=4")
    words = (
        *words,
        "--set",
        "train.checkpoint_every_steps=1",
        "--set",
        "train.keep_checkpoints=99",
    )
    first, kept, second = on_a_small_disk("disk", one, words)
    code, out, err = first
    assert (code, out) == (2, "")
    *_, last = err.splitlines()
    assert re.match(
        r"error: checkpoint: disk/run/checkpoints must take another checkpoint; got \[Errno \d+\] "
        r"(No space left on device|File too large).*; free space there, then continue with",
        last,
    )
    assert "Traceback" not in err
    assert kept and all(name.startswith("step-") for name in kept)
    newest = max(int(name.removeprefix("step-")) for name in kept)
    code, out, err = second
    assert code == 0, err
    assert f"continue from disk/run/checkpoints/step-{newest}: step {newest} of 16" in err
    code, unbroken, err = run(world, (*TRAIN, "--json", "--set", "train.passes=4"))
    assert code == 0, err
    assert json.loads(out)["test"] == json.loads(unbroken)["test"]


def test_folders_without_permission(world):
    Path("locked").mkdir(mode=0o555)
    words = (*TRAIN[:-1], "locked/run")
    assert Forked(world, words, obeys_permissions=True).start().outcome()[::2] == (
        2,
        "error: gem train: locked/run must be open to this user; got permission denied; change its "
        "permissions or choose another place\n",
    )
    shutil.rmtree("run/checkpoints/step-4")
    before = latest_complete(Path("run/checkpoints"))
    Path("run/checkpoints").chmod(0o555)
    code, _, err = Forked(world, RESUME, obeys_permissions=True).start().outcome()
    Path("run/checkpoints").chmod(0o755)
    assert (code, err.count("\n")) == (2, 1), err
    assert "run/checkpoints" in err and "permission" in err.lower()
    assert latest_complete(Path("run/checkpoints")) == before
    code, _, err = run(world, RESUME)
    assert (code, err) == (0, "")


@pytest.mark.parametrize("locked", ["", "step-4", "step-4/manifest.json"])
def test_a_checkpoint_that_may_not_be_read_is_not_taken_for_a_missing_one(world, locked):
    """To begin anew, or from an older one, would overwrite what is there."""
    path, log = Path("run/checkpoints", locked), Path("run/metrics.jsonl")
    before, mode = log.read_bytes(), path.stat().st_mode
    path.chmod(0)
    code, _, err = Forked(world, RESUME, obeys_permissions=True).start().outcome()
    path.chmod(mode)
    assert (code, err.count("\n")) == (2, 1), err
    assert re.search(r"run/checkpoints\S* must be open to this user; got permission denied", err)
    assert log.read_bytes() == before


def test_a_folder_of_data_that_may_not_be_read_is_not_taken_for_an_empty_one(world):
    Path("data/examples").chmod(0)
    code, _, err = Forked(world, TRAIN, obeys_permissions=True).start().outcome()
    Path("data/examples").chmod(0o755)
    assert (code, err.count("\n")) == (2, 1), err
    assert "data/examples must be open to this user; got permission denied" in err


def test_a_file_of_a_checkpoint_that_may_not_be_read_is_not_to_be_removed(world):
    path = Path("run/checkpoints/step-4/__0_0.distcp")
    path.chmod(0)
    code, _, err = Forked(world, RESUME, obeys_permissions=True).start().outcome()
    path.chmod(0o644)
    assert (code, err.count("\n")) == (2, 1), err
    assert err.endswith("got a file that cannot be read; check its permissions and the disk\n")


def test_names_that_are_no_text_are_refused_before_anything_is_done(world):
    code, _, err = run(world, ("train", "recipe.toml", "--out", "new\udcff"))
    assert (code, err.count("\n")) == (2, 1), err
    assert r"must be text in UTF-8, as Parquet takes no other names; got 'new\udcff'" in err
    assert not Path("new\udcff").exists()


@pytest.mark.parametrize("columns", [10**11, 2**62])
def test_too_little_memory_is_one_line(world, columns):
    """More than any machine has, so that nothing is really taken; and more than can be counted."""
    words = (*TRAIN, "--set", f"model.embeddings.embedding_dim={columns}")
    code, _, err = run(world, words)
    assert (code, err.count("\n")) == (2, 1)
    assert "gem train: memory must hold the model, its optimizers and a batch; got " in err


def test_what_is_normal_trains(world):
    """A stream without events, a user without a history, missing values, unknown labels."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    clicks = Path("data/events/clicks/part-00000.parquet")
    pq.write_table(pq.read_table(clicks).slice(0, 0), clicks)
    examples = Path("data/examples/part-00000.parquet")
    table = pq.read_table(examples)
    for name in ("item_id", "click"):
        place = table.schema.get_field_index(name)
        values = [None if row % 3 == 0 else v for row, v in enumerate(table[name].to_pylist())]
        table = table.set_column(place, name, pa.array(values, table.schema.field(name).type))
    pq.write_table(table, examples)
    code, _, err = run(world, TRAIN)
    assert (code, err) == (0, "")
