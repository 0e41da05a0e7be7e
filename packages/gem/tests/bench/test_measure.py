"""A step is timed, its parts add up, and the report says so in every form."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import gem.bench.measure
from gem import cli
from gem.bench.asked import Asked, recipe_of
from gem.bench.kept import kept_for_backward
from gem.bench.measure import measure
from gem.bench.page import as_text
from gem.bench.picture import picture
from gem.bench.regions import region_flops
from gem.bench.rows import row_of, write_row
from gem.bench.schema import GAPS, StepReport
from gem.bench.words import region_words
from gem.config import load_recipe
from gem.dry_run.inputs import random_batch, uniform_lengths
from gem.model.build import build_model
from gem.model.flops import batch_flops
from gem.planning.schema import declared_schema
from gem_opkit.errors import MeasurementError
from gem_parallel.launch import World

ROOT = Path(__file__).parents[4]
ASKED = Asked("synthetic-debug", examples=32, steps=3, warmup=2, profiled=2)


@pytest.fixture(scope="module")
def report() -> StepReport:
    return measure(ASKED, World())


@pytest.fixture(scope="module")
def drawn():
    config = load_recipe("synthetic-debug")
    schema = declared_schema(config)
    draw = torch.Generator().manual_seed(5)
    lengths = {s.name: uniform_lengths(8, s.max_events, draw) for s in schema.streams}
    return config, schema, random_batch(schema, lengths, draw)


def test_a_report_adds_up(report):
    assert (report.gpus, report.steps, report.parts, report.examples_a_rank) == (1, 3, 1, 32)
    assert report.flops_attention + report.flops_products == report.flops_a_step
    assert report.examples_per_s == pytest.approx(32e3 / report.step_ms)
    assert report.step_ms_fastest <= report.step_ms <= report.step_ms_slowest
    # Sections follow one another: together they are the time of the steps.
    whole = sum(report.sections_ms.values())
    assert 0.5 * report.step_ms_fastest < whole < 2.0 * report.step_ms_slowest
    assert report.loss_last < 2 * report.loss_first
    reached = report.efficiency
    assert (reached.e2e_mfu, reached.local_mfu, reached.peak_tflops) == (None, None, None)
    assert reached.scaling_ratio == 1.0


def test_shares_are_the_whole_step(report):
    profile = report.profile
    assert profile.steps == 2
    assert sum(kind.share for kind in profile.kinds) == pytest.approx(1.0)
    assert sum(kind.ms for kind in profile.kinds) == pytest.approx(profile.step_ms)
    gaps = next(kind for kind in profile.kinds if kind.kind == GAPS)
    assert profile.busy_ms == pytest.approx(profile.step_ms - gaps.ms)
    assert report.host_gap_ms == max(0.0, report.step_ms - profile.busy_ms)
    regions = sum(sum(region.kinds_ms.values()) for region in profile.regions)
    assert regions == pytest.approx(profile.busy_ms)
    for region in profile.regions:
        passes = region.forward_ms + region.backward_ms + region.outside_ms
        assert passes == pytest.approx(sum(region.kinds_ms.values()))


def test_a_layer_is_the_sum_of_its_modules(report):
    layers = {layer.name: layer for layer in report.profile.layers}
    modules = [r for r in report.profile.regions if r.name.startswith("layers.1.")]
    assert len(modules) == 4  # summary, two streams, experts
    layer = layers["layers.1"]
    assert layer.backward_ms == pytest.approx(sum(r.backward_ms for r in modules))
    assert layer.attention.ms == pytest.approx(sum(r.attention.ms for r in modules))
    assert layer.whole.flops == sum(r.attention.flops + r.products.flops for r in modules)
    assert layer.whole.ms == pytest.approx(sum(layer.kinds_ms.values()))
    assert layer.whole.tflops_per_s == pytest.approx(1e-9 * layer.whole.flops / layer.whole.ms)
    assert sum(own.share for own in layers.values()) == pytest.approx(
        sum(own.share for own in report.profile.regions)
    )


def test_every_module_with_products_is_seen_in_both_passes(report):
    """Each has FLOPs forward and backward, so work without a module would be missing here."""
    seen = {region.name: region for region in report.profile.regions}
    assert {"tables", "optimizer", "rest", "heads", "layers.0.experts"} <= seen.keys()
    for region in seen.values():
        for work, kind in ((region.attention, "attention"), (region.products, "products")):
            if work.flops:
                assert region.kinds_ms[kind] > 0, region.name
                assert work.tflops_per_s == pytest.approx(1e-9 * work.flops / work.ms)
                assert work.peak_frac is None  # no peak is known of a CPU
        if region.products.flops:
            assert region.forward_ms > 0, region.name
            assert region.backward_ms > 0, region.name
    # Hardly any work is nobody's: losses, sums of gradients, what joins the modules.
    assert seen["rest"].share < 0.1


def test_regions_have_the_flops_of_the_model(drawn):
    """Against torch's counter, operator by operator."""
    config, schema, batch = drawn
    found = region_flops(config, schema, batch)
    assert (
        sum(own.total for own in found.values()) == batch_flops(config.model, schema, batch).total
    )
    model = build_model(config.model, schema)
    with FlopCounterMode(display=False) as counter:
        model(batch).sum().backward()
    counted = counter.get_flop_counts()["Global"]
    attention = sum(n for op, n in counted.items() if str(op).startswith("gem_attention"))
    assert sum(own.attention.total for own in found.values()) == attention > 0


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 16, bias=False)
        self.last = nn.Linear(16, 2, bias=False)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def test_kept_memory_is_counted_once_and_without_what_is_there():
    model, x = Kept(), torch.ones(8, 4)
    with kept_for_backward([x, *model.parameters()]) as kept:
        loss = model(x).sin().sum()
    # The hidden tokens, which ReLU and the last layer both keep, and what the sine is of.
    assert kept.bytes == 4 * (8 * 16 + 8 * 2)
    loss.backward()
    with kept_for_backward([x]) as more:
        model(x)
    weights = 4 * 16 * 2  # of the last layer; the first one's input needs no gradient
    assert more.bytes == 4 * 8 * 16 + weights


def test_memory_of_a_step(report):
    memory = report.memory
    model = load_recipe("synthetic-debug").model
    assert memory.parameter_bytes > 4 * model.width
    # Two moments of each dense weight, an accumulator of each row; averages where there are some.
    assert memory.optimizer_bytes > memory.parameter_bytes
    # Keeps at least the events of both streams once a layer.
    events = report.events_a_rank[0]
    assert memory.kept_bytes > len(model.layers) * 4 * model.width * events
    assert (memory.peak_bytes, memory.peak_ratio) == (None, None)  # not counted on a CPU


def test_rows_have_what_earlier_rows_have(report, tmp_path):
    row = row_of(report)
    (earlier, *_) = (ROOT / "results" / "h200" / "step.jsonl").read_text().splitlines()
    assert set(json.loads(earlier)) - set(row) <= {"weak_scaling"}
    assert row["flops_per_example"] * 32 == pytest.approx(row["flops_a_step"])
    write_row(tmp_path, report)
    write_row(tmp_path, report.model_copy(update={"impl": "reference"}))
    # Beside the recipe's own, which plans are calibrated with.
    write_row(tmp_path, report.model_copy(update={"settings": ("train.compile=aot_eager",)}))
    files = {path.name: path.read_text().splitlines() for path in (tmp_path / "cpu").iterdir()}
    assert {name: len(lines) for name, lines in files.items()} == {
        "step.jsonl": 1,
        "step_reference.jsonl": 1,
        "step_set.jsonl": 1,
    }
    assert json.loads(files["step_set.jsonl"][0])["case"].endswith(", train.compile=aot_eager")
    assert json.loads(files["step.jsonl"][0])["case"].startswith("synthetic-debug, 1 ranks")
    assert {f"{json.loads(lines[0])['bench']}.jsonl" for lines in files.values()} == files.keys()


def test_the_page_says_what_is_not_known(report):
    text = as_text(report)
    assert "MFU n/a: no peak is known of cpu" in text
    assert "layer 1, impressions" in text
    without = as_text(report.model_copy(update={"profile": None}))
    assert "no step was profiled here" in without


def test_the_picture_is_to_scale(report):
    svg = ElementTree.fromstring(picture(report))
    space = "{http://www.w3.org/2000/svg}"
    bars = [r for r in svg.iter(f"{space}rect") if r.get("height") == "30"]
    times = [kind.ms for kind in report.profile.kinds if kind.kind != GAPS]
    times.append(report.host_gap_ms)  # that of the timed steps
    drawn = [960 * ms / sum(times) for ms in times]
    assert [float(bar.get("width")) for bar in bars] == pytest.approx(
        [width for width in drawn if width > 0.05], abs=0.051
    )
    texts = Counter(text.text for text in svg.iter(f"{space}text"))
    assert texts["layer 1, impressions"] == 1
    assert any(text.startswith("synthetic-debug on cpu: ") for text in texts)
    inside = [float(t.get("x")) for t in svg.iter(f"{space}text")]
    assert 0 <= min(inside) <= max(inside) <= 1000
    assert "no step was profiled" in picture(report.model_copy(update={"profile": None}))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layers.0.streams.stream_clicks", "layer 1, clicks"),
        ("layers.3.experts", "layer 4, experts"),
        ("layers.3", "layer 4"),
        ("events.stream_clicks", "events, clicks"),
        ("heads", "heads"),
    ],
)
def test_modules_have_short_names(name, words):
    assert region_words(name) == words


def test_a_step_that_computes_something_else_is_not_timed(monkeypatch):
    monkeypatch.setattr(gem.bench.measure, "LOSS_BAND", 1e-6)
    with pytest.raises(MeasurementError, match="loss must be finite and begin near"):
        measure(ASKED, World())


def test_balanced_batches_are_dealt_as_a_reader_deals_them():
    """No example is lost, every rank has as many, and the heaviest rank has less to do."""

    def of_ranks(*settings):
        asked = Asked("synthetic-debug", settings=settings, plan=("replicate=2",), examples=32)
        found = []
        for rank in range(2):
            world = World(rank=rank, size=2)
            config = recipe_of(asked, world)
            schema = declared_schema(config)
            batches = gem.bench.measure._batches(asked, config, schema, world)
            flops = [batch_flops(config.model, schema, batch).total for batch in batches]
            lengths = [sorted(b.streams["impressions"].numbers.lengths.tolist()) for b in batches]
            found.append((flops, lengths, [len(batch.labels_BA) for batch in batches]))
        return found

    plain, dealt = of_ranks(), of_ranks("parallel.balance=global", "parallel.base_batch=2")
    for each in (plain, dealt):
        assert [counts for _, _, counts in each] == [[32] * 4] * 2
    for place in range(4):
        heaviest = [max(flops[place] for flops, _, _ in each) for each in (plain, dealt)]
        means = [sum(flops[place] for flops, _, _ in each) / 2 for each in (plain, dealt)]
        assert heaviest[1] / means[1] < 1.002
        assert heaviest[0] / means[0] > 1.002


def test_a_loss_that_breaks_later_is_not_timed():
    """A rate that no weights survive; the guard that would stop the run is told to skip."""
    broken = ("train.dense.lr=1e6", "train.guard.nonfinite=skip", "train.schedule.warmup_steps=0")
    asked = Asked("synthetic-debug", settings=broken, examples=8, steps=5, warmup=1, profiled=0)
    with pytest.raises(MeasurementError, match="loss must be finite in every step; got nan in"):
        measure(asked, World())


def test_what_memory_does_not_hold_runs_in_parts(monkeypatch):
    """Memory that holds no batch of more than 8 examples at a time."""
    real, told = gem.bench.measure.build_step, []

    def build(config, *given, **more):
        step = real(config, *given, **more)
        if config.train.batch_examples / config.train.accumulation_parts > 8:
            step._gradients = out_of_memory
        return step

    def out_of_memory(batch):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(gem.bench.measure, "build_step", build)
    asked = Asked("synthetic-debug", examples=32, steps=1, warmup=1, profiled=0)
    report = measure(asked, World(), told=told.append)
    assert report.parts == 4
    assert [stage for stage in told if "memory" in stage] == [
        "memory does not hold it: 2 parts",
        "memory does not hold it: 4 parts",
    ]
    monkeypatch.undo()
    # Of the largest part alone: the parts before it have given theirs back.
    assert report.memory.kept_bytes < 0.5 * measure(asked, World()).memory.kept_bytes


@pytest.fixture
def gem_command(monkeypatch, capsys, tmp_path):
    """Runs a command in this process, in a folder of its own: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["gem", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capsys.readouterr()

    return run


def test_the_command_prints_one_document_and_draws(gem_command):
    few = ("--examples", 8, "--steps", 2, "--warmup", 1, "--profile", 1)
    files = ("--out", "a/step.json", "--svg", "a/step.svg", "--rows", "rows")
    code, out, err = gem_command("bench", "step", "synthetic-debug", *few, *files, "--json")
    assert code == 0
    report = StepReport.model_validate_json(out)
    assert report == StepReport.model_validate_json(Path("a/step.json").read_text())
    assert (report.version, report.recipe, report.steps) == (1, "synthetic-debug", 2)
    assert Path("a/step.svg").read_text().startswith("<svg")
    assert Path("rows/cpu/step.jsonl").exists()
    assert "timed" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--impl", "cuda"), "--impl must be one of auto, reference, triton; got 'cuda'"),
        (("--svg", "x.svg", "--profile", 0), "--svg must go with profiled steps"),
        (("--check", 3), "--check must run in one process on a GPU; got 1 ranks on cpu"),
        (("--plan", "shard=2"), "must be the world size 1; got 1 * 2 * 1 = 2"),
        (("--plan", "shard"), "--plan must look like shard=2; got 'shard'"),
        (
            ("--endure", 3, "--svg", "x.svg"),
            "--svg must come without --check and --endure; got x.svg",
        ),
        (
            ("--check", 3, "--out", "x.json"),
            "--out must come without --check and --endure; got x.json",
        ),
        *(
            ((*alone, *words), f"{words[0]} must come without --check and --endure; got {got}")
            for alone in (("--endure", 3), ("--check", 3))
            for words, got in (
                (("--steps", 20), "20"),  # the default, but asked for
                (("--warmup", 2), "2"),
                (("--profile", 0), "0"),
                (("--device-batches",), "on"),
            )
        ),
        # Refused before anything is measured, so that nothing that was measured is lost.
        (("--out", "."), "must be a file, not a folder"),
        (("--svg", "/proc/none/x.svg"), "/proc/none must exist"),
    ],
)
def test_wrong_words_are_one_line(gem_command, words, said):
    code, out, err = gem_command(
        "bench", "step", "synthetic-debug", "--set", "train.device=cpu", *words
    )
    assert (code, out) == (2, "")
    (line,) = err.strip().splitlines()
    assert line.startswith("error: ")
    assert said in line


@pytest.mark.gpu
def test_kernels_of_a_gpu_are_attributed(tmp_path):
    """In a process of its own, as models are drawn on the device there."""
    few = ("--examples", "32", "--steps", "2", "--warmup", "2", "--out", "step.json")
    command = [sys.executable, "-m", "gem", "bench", "step", "synthetic-debug", *few]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    report = StepReport.model_validate_json((tmp_path / "step.json").read_text())
    profile = report.profile
    assert sum(kind.ms for kind in profile.kinds) == pytest.approx(profile.step_ms)
    kinds = {kind.kind: kind for kind in profile.kinds}
    for kind in ("attention", "products", "elementwise", "tables", "optimizer"):
        assert kinds[kind].launches > 0, kind
        assert kinds[kind].ms > 0, kind
    seen = {region.name: region for region in profile.regions}
    assert all(r.forward_ms > 0 and r.backward_ms > 0 for r in seen.values() if r.products.flops)
    assert all(r.kinds_ms.get("attention", 0) > 0 for r in seen.values() if r.attention.flops)
    assert seen["rest"].share < 0.1
    assert report.memory.peak_bytes >= report.memory.kept_bytes
