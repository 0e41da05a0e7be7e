"""The command line, as a person or a script meets it."""

import itertools
import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gem.cli import main
from gem.commands.ending import end_early
from gem.config import shipped_recipes
from gem.data.prepare import NAMES, default_folder, prepare
from gem.train import held_out

RESULTS = ("steps", "examples", "progressive", "valid", "test")


@pytest.fixture
def gem(monkeypatch, capsys, tmp_path):
    """Runs a command in this process, in a folder of its own: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gem", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        return (0 if code is None else code), *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def data(tiny, data_root):
    spec = tiny().data
    folder = default_folder(spec, data_root)
    prepare("synthetic", folder, options=spec.synthetic)
    return f"data.folder={folder}"


def start(*words: object, **options) -> subprocess.Popen:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=env, text=True, **pipes, **options)


def wait_for(path: Path, alive: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert alive(), f"ended before {path} came"
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.005)


def results(summary):
    return {key: summary[key] for key in RESULTS}


def test_help_answers_without_torch():
    program = (
        "import sys; sys.argv = ['gem', '--help']\n"
        "from gem.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    for command in ("train", "eval", "predict", "data", "doctor"):
        assert command in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


def test_version(gem):
    from gem import __version__

    assert gem("--version") == (0, f"gem {__version__}\n", "")


def test_train_and_eval_agree(gem, tiny_file, data):
    code, out, err = gem("train", tiny_file, "--set", data, "--out", "run", "--json")
    assert code == 0, err
    summary = json.loads(out)
    assert summary == json.loads(Path("run/summary.json").read_text())
    for words in ("build model gem", "train 10 steps", "evaluate test", "peak memory"):
        assert words in err
    code, out, err = gem("eval", "run", "--json", "--predictions")
    assert code == 0, err
    found = json.loads(out)
    assert found["valid"] == summary["valid"]
    assert found["test"] == summary["test"]
    assert Path("run/predictions.parquet").exists()


def test_the_table_comes_last_and_the_default_folder_has_the_seed(gem, tiny_file, data):
    code, out, err = gem("train", tiny_file, "--set", data, "--seed", 7)
    assert (code, err) == (0, "")
    assert Path("runs/tiny-7/summary.json").exists()
    last = out[out.index("tiny on synthetic, seed 7") :]
    assert re.search(r"test +click +40 +[\d.]+", last)
    assert "stories" not in last
    assert "by domain: runs/tiny-7/summary.json, or gem eval runs/tiny-7 --domains" in last
    assert "examples/s" in last
    code, out, err = gem("eval", "runs/tiny-7", "--domains")
    assert (code, err) == (0, "")
    assert re.search(r"test +click +40 .*\n +feed +\d+ .*\n +stories +\d+ ", out)
    assert "by domain" not in out


def one_line_error(outcome):
    code, out, err = outcome
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    return err


def test_user_errors_are_one_line_and_exit_code_2(gem, tiny_file, tmp_path):
    error = one_line_error(gem("train", tiny_file, "--set", "train.batchsize=3"))
    assert "unknown key 'train.batchsize'; did you mean 'train.batch_examples'?" in error
    error = one_line_error(gem("train", "ml100k-tim"))
    assert "did you mean ml100k-time" in error
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    error = one_line_error(gem("train", tiny_file, "--out", "used"))
    assert "--resume" in error
    assert "config.toml" in one_line_error(gem("eval", "used"))
    assert "dataset.toml" in one_line_error(gem("data", "check", "used"))
    assert "movielens-100k" in one_line_error(gem("data", "prepare", "movielens", "--out", "d"))
    error = one_line_error(gem("train", tiny_file, "--set", "precision.default=mxfp8"))
    assert "gem train: precision.default must be a format that is built" in error
    assert "; got mxfp8; " in error
    error = one_line_error(
        gem("train", tiny_file, "--out", "other", "--set", "precision.layer_formats.norm=mxfp8")
    )
    assert "precision.layer_formats.norm must" in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["frobnicate"], "gem: COMMAND must be one of train, eval, predict, "),
        (["trian", "x"], "got 'trian'; did you mean train?"),
        (
            ["data", "chek"],
            "gem data: COMMAND must be one of prepare, slice, check; got 'chek'; did you",
        ),
        (["train"], "gem train: RECIPE must be given; got nothing; see gem train --help"),
        (["train", "x", "--sed", "3"], "; got --sed; did you mean --seed?"),
        (["--zzz"], "gem: OPTION must be one of --debug, --version, --help; got --zzz; see gem"),
        (["train", "x", "--seed", "q"], "got invalid value for '--seed': "),
        (["train", "x", "y"], "got unexpected extra argument"),
        (["train", "x", "--out"], "got option '--out' requires an argument"),
    ],
)
def test_wrong_words_are_one_line_too(gem, words, said):
    assert said in one_line_error(gem(*words))


@pytest.mark.parametrize("words", [[], ["data"], ["bench"]])
def test_no_command_shows_the_help(gem, words):
    code, out, err = gem(*words)
    assert code == 2
    assert "Commands" in out + err
    assert "error: " not in out + err


def test_help_keeps_the_command_for_several_ranks_whole(gem, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = gem("train", "--help")
    assert code == 0
    assert any(
        line.strip() == "torchrun --nproc-per-node N -m gem train ..." for line in out.splitlines()
    )


@pytest.mark.parametrize(
    ("words", "names"),
    [(("train",), shipped_recipes()), (("data", "prepare"), NAMES)],
)
def test_help_names_everything_that_can_be_asked_for(gem, words, names):
    _, out, _ = gem(*words, "--help")
    assert names
    assert all(re.search(rf"\b{name}\b", out) for name in names)


def test_help_flows_at_any_width(gem, monkeypatch):
    for width in (60, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        _, out, _ = gem("eval", "--help")
        above = out.split("╭")[0].splitlines()
        start = next(i for i, line in enumerate(above) if line.strip().startswith("RUN may"))
        text = [line.strip() for line in above[start:] if line.strip()]
        # No line ends where the first word of the next one would have fitted.
        for line, after in itertools.pairwise(text):
            assert len(line) + 1 + len(after.split()[0]) > width - 2


def test_what_doctor_says_is_a_line_each_in_a_pipe(gem):
    found = json.loads(gem("doctor", "--json")[1])
    lines = gem("doctor")[1].splitlines()
    said = [*(f"note: {text}" for text in found["notes"]), *found["problems"]]
    assert found["notes"]
    assert all(any(line.endswith(text) for line in lines) for text in said)
    assert max(map(len, lines)) < 400  # nothing is filled up to the edge that a pipe has not


def test_a_switch_shows_no_value_in_the_help(gem):
    for words in ((), ("train",), ("data",), ("data", "check"), ("doctor",)):
        _, out, _ = gem(*words, "--help")
        assert "--help" in out
        assert "<bool>" not in out


def test_training_again_needs_resume(gem, tiny_file, data):
    train = ("train", tiny_file, "--set", data, "--out", "run", "--json")
    code, first, _ = gem(*train)
    assert code == 0
    assert "is not empty" in one_line_error(gem(*train))
    code, again, err = gem(*train, "--resume")
    assert code == 0
    # Nothing was trained, so the speed and the memory are those of the run that trained.
    assert json.loads(again) == json.loads(first)
    assert json.loads(Path("run/summary.json").read_text()) == json.loads(first)
    assert "examples/s" not in err
    Path("run/summary.json").unlink()
    code, again, err = gem(*train, "--resume")
    assert code == 0
    assert set(json.loads(again)["throughput"].values()) == {None}
    assert results(json.loads(again)) == results(json.loads(first))
    assert "examples/s" not in err


def test_killed_and_resumed_equals_unbroken(gem, tiny_file, data, tmp_path, monkeypatch):
    train = ("train", tiny_file, "--set", data, "--json")
    _, out, _ = gem(*train, "--out", "whole")
    unbroken = json.loads(out)
    # With a checkpoint after every step it can be killed anywhere, also while writing one.
    words = (*train, "--out", "broken", "--set", "train.checkpoint_every_steps=1")
    # From the fork server, which has torch loaded; it passes folder and arguments on.
    monkeypatch.setattr(sys, "argv", ["gem", *map(str, words)])
    killed = multiprocessing.get_context("forkserver").Process(target=main)
    killed.start()
    wait_for(tmp_path / "broken" / "checkpoints" / "step-4", killed.is_alive)
    killed.kill()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert not (tmp_path / "broken" / "summary.json").exists()
    code, out, err = gem(*train, "--out", "broken", "--resume")
    assert code == 0, err
    assert "continue from broken/checkpoints/step-" in err
    assert results(json.loads(out)) == results(unbroken)


def test_interrupt_ends_after_the_step_and_says_how_to_go_on(gem, tiny_file, data, tmp_path):
    train = ("train", tiny_file, "--set", data, "--json")
    # Long enough that the signal comes before the end on a busy machine, too.
    train = (*train, "--set", "train.passes=4")
    _, out, _ = gem(*train, "--out", "whole", "--set", "train.checkpoint_every_steps=40")
    unbroken = json.loads(out)
    train = (*train, "--set", "train.checkpoint_every_steps=5")
    stopped = start("gem", *train, "--out", "stopped")
    wait_for(tmp_path / "stopped" / "checkpoints" / "step-5", lambda: stopped.poll() is None)
    stopped.send_signal(signal.SIGINT)
    out, err = stopped.communicate(timeout=60)
    assert (stopped.returncode, out) == (130, ""), err
    assert "Traceback" not in err
    step = int(re.search(r"stopped after step (\d+)", err)[1])
    assert (tmp_path / "stopped" / "checkpoints" / f"step-{step}" / "manifest.json").exists()
    [(python, command)] = re.findall(r"(\S*python\S*) -m gem (train .*--resume)", err)
    # Another Python on the PATH would not have the packages.
    found = shutil.which(python)
    assert found is not None and Path(found).absolute() == Path(sys.executable).absolute()
    code, out, err = gem(*shlex.split(command))
    assert code == 0, err
    assert results(json.loads(out)) == results(unbroken)


def test_a_termination_outside_the_loop_says_how_to_go_on(gem, tiny_file, data, monkeypatch):
    def evaluate_for_ever(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("gem.train.loop.train", evaluate_for_ever)
    code, out, err = gem("train", tiny_file, "--set", data)
    assert code == 0
    assert "terminated. Continue with:" in err + out and "--resume" in err + out
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_termination_ends_training_and_its_evaluations_well(
    gem, tiny_file, data, tmp_path, monkeypatch
):
    """The scheduler's way: a checkpoint, exit code 0, and the same run when it goes on."""
    train = ("train", tiny_file, "--set", data, "--json")
    _, out, _ = gem(*train, "--out", "whole")
    unbroken = json.loads(out)
    words = (*train, "--out", "part", "--set", "train.checkpoint_every_steps=1")
    monkeypatch.setattr(sys, "argv", ["gem", *map(str, words)])
    # From the fork server, which has torch loaded.
    stopped = multiprocessing.get_context("forkserver").Process(target=main)
    stopped.start()
    wait_for(tmp_path / "part" / "checkpoints" / "step-2", stopped.is_alive)
    stopped.terminate()
    stopped.join(60)
    assert stopped.exitcode == 0
    assert not (tmp_path / "part" / "summary.json").exists()

    # Now within the evaluation at the end.
    asked = held_out.asked_to_stop

    def terminated(run):
        os.kill(os.getpid(), signal.SIGTERM)
        return asked(run)

    monkeypatch.setattr(held_out, "asked_to_stop", terminated)
    code, out, err = gem(*train, "--out", "part", "--resume")
    assert (code, json.loads(out)) == (0, {"finished": False, "steps": 10, "folder": "part"})
    assert "stopped after step 10; the checkpoint is written. Continue with:" in err
    assert not (tmp_path / "part" / "summary.json").exists()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gem", *map(str, (*train, "--out", "part", "--resume"))])
    code, out, err = gem(*train, "--out", "part", "--resume")
    assert code == 0, err
    assert results(json.loads(out)) == results(unbroken)


def test_a_termination_of_a_command_that_only_reads_leaves_nothing_half_written(
    gem, tiny_file, data, tmp_path, monkeypatch
):
    code, _, err = gem("train", tiny_file, "--set", data, "--out", "run", "--json")
    assert code == 0, err

    def terminated(run):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)

    monkeypatch.setattr(held_out, "asked_to_stop", terminated)
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    for words in (("eval", "run", "--predictions"), ("predict", "run", "--out", "new")):
        code, _, err = gem(*words)
        assert (code, err) == (128 + signal.SIGTERM, "terminated; nothing was written\n")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "tiny.toml"]


@pytest.mark.parametrize(
    ("places", "launch"),
    [
        ({"WORLD_SIZE": "1"}, ""),
        (
            {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1"},
            "torch.distributed.run --nproc-per-node 4 -m ",
        ),
        (
            {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2"},
            "torch.distributed.run --nnodes 2 --nproc-per-node 8 -m ",
        ),
    ],
)
def test_command_that_goes_on_has_the_hosts_and_the_ranks_of_each(
    places, launch, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["gem", "train", "mine.toml", "--resume"])
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ending:
        end_early("stopped", signal.SIGTERM)
    assert ending.value.code == 0
    assert f" -m {launch}gem train mine.toml --resume\n" in capsys.readouterr().err


def test_two_ranks_continue_one_reach_what_it_reaches_and_one_continues_them(gem, tiny_file, data):
    train = ("train", tiny_file, "--set", data, "--set", "model.dropout=0.0", "--json")
    # 33 does not divide by 2, and the last batch of 23 is smaller.
    train = (*train, "--set", "train.batch_examples=33", "--set", "train.predictions=true")
    for setting in ("accumulation_parts=2", "interim.every_steps=2", "guard.nonfinite=skip"):
        train = (*train, "--set", f"train.{setting}")
    _, out, _ = gem(*train, "--out", "one")
    one = json.loads(out)
    shutil.copytree("one", "two")
    for step in (6, 9, 10):
        shutil.rmtree(f"two/checkpoints/step-{step}")
    ranks = start(
        *("torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "gem"),
        *(*train, "--out", "two", "--resume"),
    )
    out, err = ranks.communicate(timeout=120)
    assert ranks.returncode == 0, err
    assert "continue from two/checkpoints/step-3" in err
    assert json.loads(Path("two/checkpoints/step-10/manifest.json").read_text())["world_size"] == 2
    two = json.loads(out)
    assert (two["world_size"], two["examples"], two["steps"]) == (2, 320, 10)
    # What is done once a batch is done once a rank.
    flops = [run["efficiency"]["flops_per_example"] for run in (one, two)]
    assert flops[0] <= flops[1] < 1.01 * flops[0]
    for split in ("progressive", "valid", "test"):
        for task, found in one[split].items():
            for key in ("ne", "logloss", "calibration", "auc"):
                assert two[split][task][key] == pytest.approx(found[key], rel=1e-4), (split, task)
            for key in ("examples", "positives"):
                assert two[split][task][key] == found[key]
    import pyarrow.parquet as pq

    tables = [pq.read_table(f"{name}/predictions.parquet") for name in ("one", "two")]
    assert tables[0]["row"].to_pylist() == tables[1]["row"].to_pylist()
    p = [table["p"].to_pylist() for table in tables]
    assert p[0] == pytest.approx(p[1], abs=1e-4)

    for step in (9, 10):
        shutil.rmtree(f"two/checkpoints/step-{step}")
    code, out, err = gem(*train, "--out", "two", "--resume")
    assert code == 0, err
    assert "continue from two/checkpoints/step-6" in err
    mixed = json.loads(out)
    assert (mixed["world_size"], mixed["examples"]) == (1, 320)
    for split in ("progressive", "test"):
        found, expected = mixed[split]["click"], one[split]["click"]
        assert found["examples"] == expected["examples"]
        assert found["ne"] == pytest.approx(expected["ne"], rel=1e-4)


def test_data_prepare_and_check(gem, tmp_path):
    code, out, err = gem("data", "prepare", "synthetic", "--out", "d", "--json")
    assert (code, json.loads(out)) == (0, {"name": "synthetic", "folder": "d", "examples": 20_000})
    assert "20,000 examples in d" in err
    code, out, _ = gem("data", "check", "d")
    assert code == 0
    assert re.search(r"examples +20,000 ", out)
    assert "synthetic is sound" in out
    [file] = (tmp_path / "d" / "events" / "clicks").glob("*.parquet")
    file.write_bytes(file.read_bytes()[:-8])
    code, out, _ = gem("data", "check", "d", "--json")
    assert code == 1
    assert "clicks" in json.loads(out)["problems"][0]
