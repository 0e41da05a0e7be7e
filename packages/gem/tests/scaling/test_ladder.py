"""`gem scaling`: ladders, what is kept of them, and what is predicted."""

import json
import math
import os
import signal
from dataclasses import replace
from itertools import groupby

import pytest
import torch
from typer.testing import CliRunner

from gem import faults
from gem.cli import app
from gem.config import load_recipe
from gem.scaling import ladder, picture, processes
from gem.scaling.gains import falling, gains, synergy
from gem.scaling.read import ladders_of, read_ladder, shipped_ladders
from gem.scaling.rung import RungJob, _ne, planted_flops, planted_schema, rung_config, train_rung
from gem.scaling.spec import PlantedSpec, ScalingSpec
from gem.train.interrupt import Interrupted
from gem_opkit.errors import ConfigError, DataError, MeasurementError, UnsupportedError

BASE = str(shipped_ladders()["planted"].parent / "planted-base.toml")
SMALL = (
    *("train.batch_examples=32", "precision.default=fp32", "data.synthetic.items=100"),
    *("train.schedule.warmup_steps=1", "data.streams.impressions.max_events=10"),
)
LENGTH = "data.streams.impressions.max_events"
RUNGS = [{"name": str(n), "set": [f"model.width={16 * n}"]} for n in range(1, 6)]


def spec(**changed):
    return ScalingSpec.model_validate(
        {
            "recipe": BASE,
            "set": SMALL,
            "source": "planted",
            "planted": {"items": 100, "latents": 3, "max_events": 12},
            "examples": 64,
            "held_out": 32,
            "law": "together",
            "ladders": [
                {"name": "together", "rungs": RUNGS},
                {"name": "length", "rungs": [{"name": n, "set": [f"{LENGTH}={n}"]} for n in "48"]},
            ],
        }
        | changed
    )


@pytest.fixture
def trained(monkeypatch):
    """Rungs whose NE is a law with a little noise, and which note what was there when they ran."""
    ran, seen = [], {}
    off = {"1": 1e-3, "2": -2e-3, "3": 1.5e-3, "4": -0.5e-3, "5": 0.0}

    def train(job):
        ran.append(ladder.job_name(job))
        seen[ladder.job_name(job)] = (job.run.parent.parent / "prediction.json").is_file()
        flops = 1e6 * 3.0 ** float(job.rung)
        ne = 0.95 - 0.02 * math.log(flops / 3e6) + off.get(job.rung, 0.0)
        return {
            "ladder": job.ladder,
            "rung": job.rung,
            "seed": job.seed,
            "settings": list(job.settings),
            "content": job.content,
            "ne": {"click": ne},
            "flops_per_example": flops,
        }

    monkeypatch.setattr(processes, "train_rung", train)
    monkeypatch.setattr(ladder, "planted_flops", lambda job: 1e6 * 3.0 ** float(job.rung))
    return ran, seen, off


def test_the_last_rung_is_predicted_before_it_is_run(trained, tmp_path):
    ran, seen, _ = trained
    found = ladder.climb(spec(), tmp_path / "out")
    assert seen == {name: name.startswith(("together.5", "length")) for name in ran}
    assert ran.index("together.5.seed-1") < ran.index("length.4.seed-1")
    said = json.loads((tmp_path / "out/prediction.json").read_text())
    assert found["prediction"] == said
    assert said["rung"] == "5"
    assert said["law"]["rungs"] == 4
    assert said["low"] < said["ne"] < said["high"]
    assert said["ne"] == pytest.approx(0.95 - 0.02 * math.log(81), abs=0.005)
    assert found["outcome"]["inside"]
    assert found["law"]["eta_low"] < 0.02 < found["law"]["eta_high"]


def test_a_rung_off_the_law_is_told(trained, tmp_path):
    _, _, off = trained
    off["5"] = 0.05
    found = ladder.climb(spec(), tmp_path / "out")
    assert not found["outcome"]["inside"]
    assert "outside the band" in picture.law_words(found)[1]


def test_what_is_there_is_not_run_again(trained, tmp_path):
    ran, _, _ = trained
    out = tmp_path / "out"
    first = ladder.climb(spec(), out)
    assert len(ran) == 7
    (out / "rungs/length.8.seed-1.json").unlink()
    written = (out / "prediction.json").stat().st_mtime_ns
    assert ladder.climb(spec(), out) == first
    assert ran[7:] == ["length.8.seed-1"]
    assert (out / "prediction.json").stat().st_mtime_ns == written
    with pytest.raises(ConfigError, match="one of the same ladders"):
        ladder.climb(spec(examples=96), out)
    # A prediction that is lost cannot be made again once its rung is known.
    (out / "prediction.json").unlink()
    with pytest.raises(ConfigError, match="a prediction that was written before its rung was run"):
        ladder.climb(spec(), out)


def test_a_ladder_that_is_cut_off_has_its_law(trained, tmp_path, monkeypatch):
    there, out = processes.train_rung, tmp_path / "out"

    def train(job):
        if job.ladder == "length" and job.rung == "8":
            raise DataError("cut off")
        return there(job)

    monkeypatch.setattr(processes, "train_rung", train)
    with pytest.raises(DataError, match="cut off"):
        ladder.climb(spec(), out)
    found = json.loads((out / "scaling.json").read_text())
    assert found["outcome"]["inside"]
    assert {rung["ladder"] for rung in found["rungs"]} == {"together"}
    assert {r["rung"] for r in ladder.collect(spec(), out)["rungs"]} == {*"12345", "4"}
    assert "The line is the law" in (out / "report.html").read_text()


def test_the_pictures_show_every_rung_and_the_band(trained, tmp_path):
    found = ladder.climb(spec(), tmp_path / "out")
    svg = (tmp_path / "out/scaling.svg").read_text()
    page = (tmp_path / "out/report.html").read_text()
    assert svg.startswith("<svg") and 'xmlns="http://www.w3.org/2000/svg"' in svg
    assert svg.count("<circle") == 7
    assert svg.count('class="band') == svg.count('class="whisker') == 1
    assert page.count('<svg class="plot wide') == page.count('<svg class="plot narrow') == 1
    for line in picture.law_words(found):
        assert line in page
    assert "<script" not in page and "The line is the law" in page


def test_seeds_are_averaged(trained, tmp_path):
    ran, _, _ = trained
    found = ladder.climb(spec(seeds=(1, 2)), tmp_path / "out")
    assert len(ran) == 14
    assert found["law"]["rungs"] == 4


def test_a_ladder_may_have_seeds_of_its_own(trained, tmp_path):
    ran, _, _ = trained
    own = {"name": "together", "rungs": RUNGS, "seeds": [4, 5]}
    length = {"name": "length", "rungs": [RUNGS[0], {"name": "9", "set": [f"{LENGTH}=4"]}]}
    found = ladder.climb(spec(ladders=[own, length], seeds=(5,)), tmp_path / "out")
    assert sorted(name[-1] for name in ran) == ["4"] * 5 + ["5"] * 6
    both = synergy(found, "click")
    assert (both.together.error, both.alone[0].error) == (pytest.approx(0, abs=1e-12), None)


def test_a_model_that_is_in_two_ladders_is_trained_once(trained, tmp_path):
    ran, _, off = trained
    off["9"] = 0.01
    twice = [RUNGS[1] | {"name": "2b"}, {"name": "9", "set": [f"{LENGTH}=4"]}]
    ladders = [{"name": "length", "rungs": twice}, {"name": "together", "rungs": RUNGS}]
    found = ladder.climb(spec(ladders=ladders, seeds=(1, 2)), tmp_path / "out")
    assert sorted(ran) == sorted(
        f"{name}.seed-{seed}"
        for name in ("length.9", *(f"together.{n}" for n in range(1, 6)))
        for seed in (1, 2)
    )
    own = {(r["ladder"], r["rung"], r["seed"]): r for r in found["rungs"]}
    for seed in (1, 2):
        copied = own["length", "2b", seed]
        assert copied["same_as"] == {"ladder": "together", "rung": "2"}
        assert copied["ne"] == own["together", "2", seed]["ne"]
    both = synergy(found, "click")
    assert (both.together.first, both.together.last) == ("2", "5")
    assert both.together.cost == pytest.approx(27)
    assert both.together.fall == pytest.approx(0.02 * math.log(27) - 2e-3)
    assert both.together.error == pytest.approx(0.0, abs=1e-12)
    assert both.sum_of_falls == pytest.approx(0.02 * 7 * math.log(3) - 12e-3)
    assert "From rung 2, each direction alone" in (tmp_path / "out/report.html").read_text()
    with pytest.raises(ConfigError, match=r"together\.5\.seed-1 must be another model.*rung 4"):
        same = [*RUNGS[:4], RUNGS[3] | {"name": "5"}]
        ladder.climb(spec(ladders=[{"name": "together", "rungs": same}]), tmp_path / "new")


def test_the_error_of_a_gain_is_that_of_its_seeds(trained, tmp_path, monkeypatch):
    there = processes.train_rung

    def train(job):
        found = there(job)
        found["ne"]["click"] -= 1e-3 * job.seed * float(job.rung)
        return found

    monkeypatch.setattr(processes, "train_rung", train)
    found = ladder.climb(spec(seeds=(1, 3)), tmp_path / "out")
    # The falls from 4 to 8 events differ by 8e-3 between the seeds.
    (gain,) = (gain for gain in gains(found, "click") if gain.ladder == "length")
    assert gain.error == pytest.approx(4e-3)
    assert synergy(found, "click") is None


def test_a_ladder_cut_off_between_its_seeds_gains_nothing_yet(trained, tmp_path, monkeypatch):
    """Its first rung is there with one seed, its last with another: nothing can be paired."""
    out = tmp_path / "out"
    ladder.climb(spec(seeds=(1, 2)), out)
    for name in ("length.4.seed-1", "length.8.seed-2"):
        (out / "rungs" / f"{name}.json").unlink()
    monkeypatch.setattr(processes, "train_rung", lambda job: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # the next of them, when the law is written again
        ladder.climb(spec(seeds=(1, 2)), out)
    found = json.loads((out / "scaling.json").read_text())
    assert [gain.ladder for gain in gains(found, "click")] == ["together"]


def test_rungs_of_the_law_tell_how_much_they_still_fell(trained, tmp_path, monkeypatch):
    there = processes.train_rung

    def train(job):
        found, last = there(job), 1e-3 * float(job.rung) * job.seed
        return found | {
            "ne_while_training": [0.9, found["ne"]["click"] + last, found["ne"]["click"]]
        }

    monkeypatch.setattr(processes, "train_rung", train)
    found = ladder.climb(spec(seeds=(1, 3)), tmp_path / "out")
    fifth = [r for r in found["rungs"] if (r["ladder"], r["rung"]) == ("together", "5")]
    assert falling(fifth) == pytest.approx(1e-2)
    told = "still fell: 1 by 0.00200, 2 by 0.00400, 3 by 0.00600, 4 by 0.00800, 5 by 0.01000."
    assert told in picture.law_words(found)[2]
    assert told in (tmp_path / "out/report.html").read_text()
    # Of a rung without a curve, or of a single part, nothing is said.
    assert falling([fifth[0], {"ne": {}}]) is None
    assert falling([fifth[0] | {"ne_while_training": [0.9]}]) is None


def test_processes_are_dealt_to_gpus_evenly():
    gpus = processes.Gpus(3, "5,2,7")
    with gpus.one() as first, gpus.one() as second:
        assert (first, second) == ("5", "2")
        with gpus.one() as third, gpus.one() as fourth:
            assert (third, fourth) == ("7", "5")
        with gpus.one() as again:
            assert again == "7"
    for count, visible in ((0, None), (1, None), (1, "3")):
        with processes.Gpus(count, visible).one() as none:
            assert none is None
    with processes.Gpus(2, None).one() as first:
        assert first == "0"


def test_a_process_sees_its_gpu_alone(trained, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    job = next(iter(ladder._jobs(spec(), tmp_path, "cpu")))
    processes._apart(job, tmp_path / "x", "3")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


def test_content_joins_inputs_and_events(tmp_path):
    rungs = [*RUNGS[:3], {"name": "4", "content": 2}]
    asked = spec(ladders=[{"name": "together", "rungs": rungs}])
    *_, job = ladder._jobs(asked, tmp_path, "cpu")
    schema = planted_schema(rung_config(job))
    assert [source.name for source in schema.ids] == ["item_id"]
    assert schema.numbers == schema.streams[0].numbers == ("content_00", "content_01")
    assert [source.name for source in schema.streams[0].ids] == ["item_id", "feedback"]


class Process:
    """Stands for a process: runs what it is given, or ends with a fault."""

    exitcode = 0

    def __init__(self, *, target, args, daemon):
        assert not daemon  # it may have children
        self.target, self.args = target, args

    def start(self):
        if self.args[0].rung == "8":
            self.exitcode = 1
        else:
            self.target(*self.args)

    def join(self):
        """It has run."""


class Threads:
    """Stands for multiprocessing."""

    Process = Process


def test_a_rung_that_fails_in_its_process_is_named_and_others_are_kept(
    trained, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    there = type("Context", (), {"Process": Process})
    monkeypatch.setattr(processes.multiprocessing, "get_context", lambda method: there)
    with pytest.raises(MeasurementError, match=r"length\.8\.seed-1 must be trained to its end"):
        ladder.climb(spec(), out, jobs=3)
    assert len(list((out / "rungs").iterdir())) == 6
    monkeypatch.setattr(Process, "start", lambda self: self.target(*self.args))
    assert len(ladder.climb(spec(), out, jobs=3)["rungs"]) == 7


@pytest.mark.parametrize("ne", [None, math.nan, math.inf])
def test_a_rung_without_an_ne_is_refused_and_not_kept(trained, tmp_path, monkeypatch, ne):
    there = processes.train_rung
    monkeypatch.setattr(processes, "train_rung", lambda job: there(job) | {"ne": {"click": ne}})
    with pytest.raises(DataError, match=r"together\.4\.seed-1 must have an NE.*none for click"):
        ladder.climb(spec(), tmp_path / "out")
    assert not list((tmp_path / "out/rungs").iterdir())


def test_a_stop_is_told_in_a_line_and_how_to_go_on(trained, tmp_path, monkeypatch):
    """A run in this process hears the signal itself; amid a planted rung it ends the command."""
    file = tmp_path / "ladder.toml"
    file.write_text(
        'recipe = "synthetic-debug"\n[[ladders]]\nname = "a"\nrungs = [{ name = "1" }]\n'
    )
    asked = ["scaling", str(file), "--out", str(tmp_path / "out")]
    runner = CliRunner()
    monkeypatch.setattr(ladder, "provide", lambda data, root: None)

    def heard(job):
        raise Interrupted(signal.SIGTERM, 7)

    monkeypatch.setattr(processes, "train_rung", heard)
    said = runner.invoke(app, asked, obj=faults.Asked())
    assert said.exit_code == 0, said.output
    assert "a rung stopped after step 7. Continue with:" in said.stderr
    assert "--resume" not in said.stderr

    monkeypatch.setattr(processes, "train_rung", lambda job: os.kill(os.getpid(), signal.SIGTERM))
    said = runner.invoke(app, asked, obj=faults.Asked())
    assert said.exit_code == 128 + signal.SIGTERM
    assert said.stderr == "terminated; rungs that have ended are kept\n"


@pytest.mark.parametrize("stop", [Interrupted(signal.SIGTERM, 7), KeyboardInterrupt()])
def test_a_stopped_process_shows_no_traceback(monkeypatch, tmp_path, stop):
    def train(job):
        raise stop

    monkeypatch.setattr(processes, "train_rung", train)
    with pytest.raises(SystemExit) as ending:
        processes._apart(next(iter(ladder._jobs(spec(), tmp_path, "cpu"))), tmp_path / "x", None)
    assert ending.value.code == 1


def test_a_planted_rung_is_trained(tmp_path):
    small = PlantedSpec(items=100, latents=3, max_events=12)
    job = RungJob("a", "b", BASE, SMALL, 2, 3, small, 96, 40, "cpu", tmp_path / "run")
    found, again = train_rung(job), train_rung(job)
    for key in ("seconds", "examples_per_s", "provenance"):
        found.pop(key), again.pop(key)
    assert found == again
    assert found["examples"] == 96
    assert found["held_out"] == 64
    assert found["content"] == 2
    assert len(found["ne_while_training"]) == 3
    assert found["ne_of_rates"] < found["ne"]["click"] < 1.1
    assert found["flops_per_example"] == pytest.approx(2e6, rel=1.0)


def test_labels_of_one_kind_have_no_ne_of_labels():
    sums = torch.tensor([8.0, 0.0, 2.0, 4.0, 5.0, 4.5], dtype=torch.float64)
    entropy = -8 * (0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    found = _ne(sums)
    assert found["of_labels"] is None
    assert found["of_rates"] == pytest.approx(5.0 / entropy)
    assert _ne(sums * torch.tensor([1, 0, 0, 1, 1, 1]))["of_rates"] is None


@pytest.mark.parametrize(
    "key",
    [
        *("passes=3", "ema_decay=0.9", "label_delay=wait", "guard.nonfinite=skip"),
        *("guard.spike_factor=5.0", "interim.every_steps=10"),
    ],
)
def test_keys_that_a_planted_rung_would_not_heed_are_refused(key):
    with pytest.raises(ConfigError, match=rf"train\.{key.partition('=')[0]} must be left out"):
        planted_schema(load_recipe(BASE, [*SMALL, f"train.{key}"]))


def test_a_recipe_has_ladders_of_its_own_sizes():
    found = ladders_of("ml100k-time")
    assert found.law is None
    assert {each.name for each in found.ladders} >= {"width", "embedding", "together"}
    for each in found.ladders:
        for rung in each.rungs:
            load_recipe("ml100k-time", rung.set)
    with pytest.raises(
        UnsupportedError, match=r'gem scaling: RECIPE must be of model\.kind = "gem"'
    ):
        ladders_of("ml100k-din")


def test_a_ladder_on_data_is_reported_without_a_law(tmp_path):
    file = tmp_path / "ladder.toml"
    file.write_text(
        'recipe = "synthetic-debug"\n'
        'set = ["data.synthetic.rows=400", "data.synthetic.users=40", "train.batch_examples=64"]\n'
        '[[ladders]]\nname = "width"\nrungs = [{ name = "8", set = ["model.width=8"] }]\n'
    )
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as here:
        here.chdir(tmp_path)
        asked = ["scaling", str(file), "--out", str(out)]
        said = CliRunner().invoke(app, asked, obj=faults.Asked())
    assert said.exit_code == 0, said.output
    assert "No law is fitted" in said.output
    assert "The line is the law" not in (out / "report.html").read_text()
    (rung,) = json.loads((out / "scaling.json").read_text())["rungs"]
    assert set(rung["ne"]) == {"click", "conversion"}
    assert rung["flops_per_example"] > 0


def test_rungs_beside_each_other_find_their_data_made(trained, tmp_path, monkeypatch):
    """Two that make the same data set at once would be in each other's way."""
    ran, _, _ = trained
    made = []
    monkeypatch.setattr(ladder, "provide", lambda data, root: made.append((data.dataset, [*ran])))
    monkeypatch.setattr(processes.multiprocessing, "get_context", lambda method: Threads)
    longer = {"name": "9", "set": ["data.synthetic.rows=500"]}
    on_data = {"source": "data", "law": None, "recipe": "synthetic-debug", "set": ()}
    ladders = [{"name": "rows", "rungs": [{"name": "7"}, longer]}]
    ladder.climb(spec(**on_data, ladders=ladders), tmp_path / "out", jobs=2)
    assert made == [("synthetic", []), ("synthetic", [])]
    assert len(ran) == 2


def test_shipped_ladders_can_be_climbed(tmp_path):
    """Every rung is a model that reads what the world has; each ladder grows."""
    for name in shipped_ladders():
        found = read_ladder(name)
        assert found.law is None or len(found.ladders[0].rungs) >= 5
        jobs = [
            replace(job, examples=8_192)
            for job in ladder._jobs(found, tmp_path, "cpu")
            if job.seed == found.seeds[0]
        ]
        for _, own in groupby(jobs, key=lambda job: job.ladder):
            flops = [planted_flops(job) for job in own]
            assert flops == sorted({*flops})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"law": "width"}, "law must name a ladder"),
        (
            {"ladders": [{"name": "a", "rungs": [{"name": "1", "content": 4}]}], "law": None},
            "content of rung 1 of a must be at most planted.latents.* got 4, 3 are there",
        ),
        ({"source": "data"}, "no law is claimed"),
        ({"seeds": [2, 1, 2]}, "seeds must be different; got 2, 1, 2"),
        ({"seeds": [-1]}, "greater than or equal to 0"),
        ({"seeds": []}, "at least 1 item"),
        (
            {"ladders": [{"name": "a", "rungs": RUNGS, "seeds": [1, 1]}], "law": None},
            "seeds must be different; got 1, 1",
        ),
        ({"ladders": [{"name": "together", "rungs": RUNGS[:3]}]}, "at least 4 rungs"),
        ({"ladders": [{"name": "a", "rungs": [RUNGS[0]] * 2}], "law": None}, "different names"),
    ],
)
def test_ladders_that_make_no_sense_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        spec(**changed)


def test_all_rungs_are_read_before_the_first_is_trained(trained, tmp_path, monkeypatch):
    ran, _, _ = trained
    out = tmp_path / "out"
    wrong = [*RUNGS[:4], {"name": "5", "set": ["model.width=-3"]}]
    with pytest.raises(ConfigError, match=r"together\.5\.seed-1: .*model\.width"):
        ladder.climb(spec(ladders=[{"name": "together", "rungs": wrong}]), out)
    with pytest.raises(ConfigError, match=r'data\.dataset must be "synthetic"'):
        ladder.climb(spec(recipe="ml100k-time", set=()), out)
    on_data = {"source": "data", "law": None, "recipe": "synthetic-debug", "set": ()}
    with pytest.raises(ConfigError, match=r'--device must be left out where source = "data"'):
        ladder.climb(spec(**on_data), out, device="cuda")
    with pytest.raises(ConfigError, match=r"--device must be auto, cpu or cuda; got 'tpu'"):
        ladder.climb(spec(), out, device="tpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device must be there; got cuda, and no GPU"):
        ladder.climb(spec(), out, device="cuda")
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = CliRunner().invoke(app, ["scaling", "planted", "--out", str(out)], obj=faults.Asked())
    assert isinstance(said.exception, UnsupportedError)
    assert "must run in one process; got 2 ranks" in str(said.exception)
    assert not ran
    assert not out.exists()


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "mine").write_text("x")
    with pytest.raises(ConfigError, match="must be a new or empty folder"):
        ladder.climb(spec(), tmp_path)
    with pytest.raises(
        ConfigError, match=r"RECIPE\|LADDER must be a TOML file, the ladder planted"
    ):
        read_ladder("nothing.toml")
    with pytest.raises(ConfigError, match="got 'plantet'; did you mean 'planted'"):
        read_ladder("plantet")


def test_a_ladder_file_finds_its_recipe(tmp_path):
    """Beside it, else where the shipped ladders have theirs, else among shipped recipes."""
    file = tmp_path / "mine.toml"
    text = 'recipe = "{}"\n[[ladders]]\nname = "a"\nrungs = [{{ name = "1" }}]\n'
    file.write_text(text.format("planted-base.toml"))
    assert read_ladder(str(file)).recipe == BASE
    (tmp_path / "planted-base.toml").write_text("")
    assert read_ladder(str(file)).recipe == str(tmp_path / "planted-base.toml")
    file.write_text(text.format("synthetic-debug"))
    assert read_ladder(str(file)).recipe == "synthetic-debug"
