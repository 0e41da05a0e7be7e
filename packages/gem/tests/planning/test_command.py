"""`gem plan`: its answers, its errors, and that it needs no torch and little time."""

import json
import subprocess
import sys
import time

import pytest

from gem.config import load_recipe
from gem.planning.answer import as_json, as_text
from gem.planning.command import Asked, default_topology, plan_recipe
from gem.planning.measured_rows import alone, forecast_of, read_rows
from gem.planning.rates import DEFAULT, calibrated
from gem.planning.tables import tables_of
from gem_opkit.errors import ConfigError, DataError
from gem_parallel.contract import ParallelPlan
from gem_parallel.topology import preset


def test_thousands_of_gpus_without_torch_in_seconds():
    # In a process where importing torch fails.
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "sys.argv = ['gem', 'plan', '--gpus', '4096', '--json']\n"
        "from gem.cli import main; main()"
    )
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    seconds = time.perf_counter() - began
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["gpus"] == 4096
    best = found["plans"][0]
    axes = best["plan"]
    assert axes["replicate"] * axes["shard"] * axes["expert"] == 4096
    assert axes["table_shard"] * axes["table_replicate"] == 4096
    assert best["fits"]
    assert best["memory_bytes"]["total"] < 139 * 2**30
    assert best["step_ms"] == pytest.approx(sum(best["parts_ms"].values()))
    assert 0 < best["e2e_mfu"] < best["local_mfu"] < 1
    assert seconds < 30  # ten on a machine of its own; this one runs other tests beside


def test_answer_for_people_shows_plans_and_reasons():
    text = as_text(plan_recipe(Asked("h200", 8, most=2)))
    assert "1 hosts of 8, links nvlink" in text
    assert "dense exposed" in text
    assert "all_gather" in text
    assert text.count("table_shard") > 1


def test_plan_of_the_recipe_is_forecast_beside_the_best():
    settings = ("parallel.replicate=2", "parallel.table_replicate=2")
    found = as_json(plan_recipe(Asked("h200", 2, settings=settings)))
    assert found["given"]["plan"]["replicate"] == 2
    assert found["given"]["step_ms"] >= found["plans"][0]["step_ms"]
    with pytest.raises(ConfigError, match=r"world size 4; got 2 \* 1 \* 1 = 2"):
        plan_recipe(Asked("h200", 4, settings=settings))


@pytest.mark.parametrize(
    ("recipe", "own"),
    [("h200", ()), ("synthetic-debug", ()), ("h200", ("parallel.shard=8", "parallel.expert=1"))],
)
def test_settings_of_a_plan_make_the_trainer_take_it(recipe, own):
    planned = plan_recipe(Asked(recipe, 8, settings=own, most=40))
    found = as_json(planned)["plans"]
    assert len(found) > 5
    for each in found:
        config = load_recipe(recipe, (*own, *each["settings"]))
        parallel = config.parallel
        assert parallel is not None
        assert {axis: getattr(parallel, axis) for axis in each["plan"]} == each["plan"]
        assert config.train.batch_examples == 8 * planned.work.examples
        if not parallel.tables_are_local:
            assert config.model.embeddings.initial_rows == "by_place"
            assert parallel.table_replicas == planned.tables.replicas or 1 in (
                each["plan"]["table_replicate"],
                each["plan"]["table_shard"],
            )


CHOICES = (
    'parallel.table_wire_dtype="bf16"',
    'parallel.gather_dtype="bf16"',
    'parallel.balance="global"',
)


def test_choices_beside_the_axes_are_counted_and_name_no_plan():
    steps, exposed = [], []
    for count in range(len(CHOICES) + 1):
        planned = plan_recipe(Asked("h200", 64, settings=CHOICES[:count], axes=("shard=8",)))
        assert planned.given is None
        best = planned.search.best[0].forecast
        steps.append(best.step_ms)
        exposed.append(best.parts_ms)
    assert steps == sorted(steps, reverse=True)
    assert exposed[1]["exposed tables"] < 0.7 * exposed[0]["exposed tables"]
    assert exposed[2]["weight copies"] < 0.7 * exposed[1]["weight copies"]
    assert exposed[3]["imbalance"] < 0.1 * exposed[2]["imbalance"]
    # Copies of tables average rows, as without the choices; the trainer is told.
    planned = plan_recipe(
        Asked("h200", 64, settings=CHOICES, axes=("table_shard=8", "table_replicate=8"), most=1)
    )
    assert planned.tables.replicas == "weights"
    settings = as_json(planned)["plans"][0]["settings"]
    parallel = load_recipe("h200", (*CHOICES, *settings)).parallel
    assert parallel is not None
    assert (parallel.table_replicas, parallel.gather_dtype) == ("weights", "bf16")


def test_keys_that_no_forecast_counts_are_named_and_their_plans_left_out():
    plain = plan_recipe(Asked("h200", gpus=4))
    assert "not counted" not in as_text(plain)
    assert any(ranked.forecast.plan.expert > 1 for ranked in plain.search.best)
    for settings, keys, whole in (
        (("memory.budget_gib=10",), "memory.budget_gib", ("expert",)),
        (("parallel.overlap_sides=true",), None, ("shard",)),
    ):
        planned = plan_recipe(Asked("h200", gpus=4, settings=settings))
        told = "not counted" if keys is None else f"not counted: {keys}\n"
        assert (told in as_text(planned)) == (keys is not None)
        plans = [ranked.forecast.plan for ranked in planned.search.best]
        assert all(getattr(plan, axis) == 1 for plan in plans for axis in whole)
        with pytest.raises(ConfigError, match=f"leave {whole[0]} at 1"):
            plan_recipe(Asked("h200", gpus=4, settings=settings, axes=(f"{whole[0]}=2",)))


def test_exchanges_of_experts_are_hidden_by_their_streams_in_transformer_layers():
    axes = ("expert=2", "table_shard=2")
    found = [
        plan_recipe(Asked("h200", 2, settings=(f"parallel.overlap_sides={value}",), axes=axes))
        for value in ("false", "true")
    ]
    plain, beside = (each.search.best[0].forecast.parts_ms for each in found)
    # Two of the four layers are transformer layers, whose experts exchange as much as the others.
    assert beside["exposed dense"] == pytest.approx(plain["exposed dense"] / 2, rel=0.2)
    assert beside["compute"] == pytest.approx(plain["compute"])
    sides = {unit.name: unit.beside for unit in found[1].work.units if unit.beside}
    assert sides == {"layers.0.experts": "layers.0", "layers.2.experts": "layers.2"}
    assert not any(unit.beside for unit in found[0].work.units)


def test_vectors_travel_beside_the_optimizer_where_the_trainer_sends_them_there():
    def beside(*settings, fully=False):
        config = load_recipe("h200", settings)
        plan = ParallelPlan(
            replicate=4, table_shard=2, table_replicate=2, fully_sharded_tables=fully
        )
        step = tables_of(config).step(plan, default_topology(4))
        return {each.what: each.beside for each in step.traffic}

    ahead = {"counts": "model", "ids": "optimizer", "vectors": "optimizer", "gradients": "norms"}
    mean = {"average weights and optimizer rows": "nothing"}
    assert beside() == {**ahead, **mean}
    # In parts, the next batch is not known; of fully sharded tables no row is whole by then.
    parts = beside("train.accumulation_parts=2")
    assert parts == {**dict.fromkeys(ahead, "nothing"), "gradients": "norms", **mean}
    sliced = beside(fully=True)
    assert (sliced["counts"], sliced["ids"], sliced["vectors"]) == ("model", "nothing", "nothing")


def test_far_copies_are_asked_for_and_told():
    axes = ("table_copies=far", "table_replicate=2", "fully_sharded_tables=false")
    text = as_text(plan_recipe(Asked("h200", 32, topology="gem4096", axes=axes, most=1)))
    assert "far copies" in text
    assert "--set parallel.table_copies=far" in text
    for wrong in ("table_copies=apart", "table_copies=2"):
        with pytest.raises(ConfigError, match=r"--axis must look like .* or table_copies=far|plan"):
            plan_recipe(Asked("h200", 32, topology="gem4096", axes=(wrong,), most=1))


def test_command_to_train_with_the_best_plan_is_shown():
    text = as_text(plan_recipe(Asked("h200", 16, topology="gem4096", most=1)))
    command = next(line for line in text.splitlines() if line.startswith("to train by 1"))
    start = "to train by 1 on each host: torchrun --nnodes 2 --nproc-per-node 8 -m gem train h200 "
    assert command.startswith(start)
    assert "--set train.batch_examples=16384" in command
    alone = as_text(plan_recipe(Asked("h200", 1)))
    assert "to train by 1: gem train h200\n" in alone


def test_batch_and_lengths_are_taken_as_said():
    whole = plan_recipe(Asked("h200", 1))
    less = plan_recipe(Asked("h200", 1, batch=512, lengths=("impressions=1:1024",)))
    assert less.work.examples == 512
    assert less.work.tokens == pytest.approx(whole.work.tokens / 4, rel=0.01)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (Asked("h200", 12), r"512 \* 8 = 4096, and fill whole hosts or lie in one; got 12"),
        (Asked("h200", 5000), "= 4096"),
        (Asked("h200", 2, topology="h200"), r"1 \* 1 = 1.*got 2"),
        (Asked("h200", 2, topology="h200y"), "did you mean 'h200'"),
        (Asked("h200", 2, axes=("shard",)), "--axis must look like shard=8; got 'shard'"),
        (Asked("h200", 2, axes=("shard=²",)), "--axis must look like shard=8"),
        (Asked("h200", 2, axes=("shard=" + "9" * 5000,)), "--axis must look like shard=8"),
        (Asked("h200", 2, axes=("shard=1", "shard=2")), "--axis must name each thing once"),
        (Asked("h200", 2, lengths=("impressions=²:3",)), "--lengths must look like"),
        (Asked("h200", 2, axes=("shard=3",)), r"ranks_per_host=2 = 2.*shard=3"),
        (Asked("h200", 8, axes=("expert=4",)), r"divides the experts \(2\).*expert=4"),
        (Asked("h200", 2, axes=("shards=2",)), "must name axes .*'shards'"),
        (Asked("h200", 2, lengths=("impressions=9:3",)), "--lengths must look like clicks=1:200"),
        (Asked("h200", 2, lengths=("views=1:3",)), r"a stream that is read \(impressions\)"),
        (Asked("h200", 2, ids=("tags=many",)), "--ids must look like"),
        (Asked("h200", 2, ids=("tags=nan",)), "--ids must look like"),
        (
            Asked("h200", 2, ids=("tags=2",)),
            r"--ids must name an input .*there is none.*got 'tags'",
        ),
        (
            Asked("h200", 2, settings=("parallel.balance=global", "parallel.base_batch=1024")),
            r"parallel.base_batch must be below 1024.*train.batch_examples=2048\); got 1024",
        ),
        (Asked("h200", 2, settings=("parallel.balance=local",)), "parallel.balance must be"),
        (Asked("nothing", 2), "RECIPE must be a TOML file or one of"),
        (Asked("ml100k-time", 2), "gem data prepare movielens-100k"),
    ],
)
def test_mistakes_are_told(asked, told, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=told):
        plan_recipe(asked)


def test_statistics_that_data_does_not_declare_are_asked_for(tmp_path):
    spec = """
name = "mine"
format = 1
[[tables]]
name = "user"
num_embeddings = 100
[[tables]]
name = "genre"
num_embeddings = 9
[[streams]]
name = "plays"
ids = [{name = "genre", table = "genre"}]
[examples]
rows = 10
ids = [{name = "user_id", table = "user"}, {name = "genres", table = "genre", multi = true}]
labels = [{name = "liked"}]
[[splits]]
name = "train"
start = 0
stop = 10
"""
    (tmp_path / "dataset.toml").write_text(spec, encoding="utf-8")
    settings = (
        *('data.dataset="mine"', f'data.folder="{tmp_path}"', "data.streams={plays={}}"),
        *("data.derived=[]", "model.leave_out=[]"),
    )
    with pytest.raises(ConfigError, match=r"--lengths plays=1:200"):
        plan_recipe(Asked("own-log", 1, settings=settings))
    lengths = ("plays=1:50",)
    with pytest.raises(ConfigError, match=r"--ids genres=MEAN"):
        plan_recipe(Asked("own-log", 1, settings=settings, lengths=lengths))
    asked = Asked("own-log", 1, settings=settings, lengths=lengths, ids=("genres=2.5",))
    assert plan_recipe(asked).work.tokens == pytest.approx(256 * 25.5, rel=0.02)
    (tmp_path / "dataset.toml").write_text("name = ", encoding="utf-8")
    with pytest.raises(DataError, match="must be TOML in UTF-8"):
        plan_recipe(asked)


def step_row(**sections):
    return {
        "bench": "step",
        "case": "h200, 1 ranks, replicate=1, 1024 a rank",
        "device": "NVIDIA H200",
        "gpus": 1,
        "set": [],
        "examples_a_rank": 1024,
        "sections_ms": {
            "forward": 120.0,
            "backward": 240.0,
            "tables": 8.0,
            "optimizer": 30.0,
            **sections,
        },
    }


def test_calibration_explains_the_step_that_it_was_made_from(tmp_path):
    file = tmp_path / "step.jsonl"
    file.write_text(json.dumps(step_row()) + "\n\n", encoding="utf-8")
    found = plan_recipe(Asked("h200", 1, calibrate=file))
    parts = found.search.single.parts_ms
    assert parts["compute"] == pytest.approx(360.0)
    assert parts["tables"] == pytest.approx(8.0)
    assert parts["optimizer"] == pytest.approx(30.0)
    assert "step of h200" in found.sources[-1]


def of_two(**given):
    """A step of copies on two GPUs, which tells what each takes by itself, too."""
    one = step_row()["sections_ms"]
    return step_row(tables=9.0) | {
        "case": "h200, 2 ranks, replicate=2 table_shard=2, 1024 a rank",
        "gpus": 2,
        "plan": "replicate=2 table_shard=2",
        "step_ms": 430.0,
        "alone_step_ms": [397.0, 399.0],
        "alone_mfu": [0.1, 0.1],
        # The mean of the cards is that of a row of one.
        "alone_sections_ms": {name: [ms - 1.0, ms + 1.0] for name, ms in one.items()},
        **given,
    }


def test_a_step_of_copies_tells_contention_and_what_an_engine_takes(tmp_path):
    row, file = of_two(), tmp_path / "step.jsonl"
    file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    found = calibrated(read_rows(file), preset("h200x2"))
    forecasts = forecast_of(row, found.topology, found.rates)
    assert forecasts.step_ms == pytest.approx(430.0)
    tables = forecasts.parts_ms["tables"] + forecasts.parts_ms["exposed tables"]
    assert tables == pytest.approx(9.0)
    assert found.rates.contention > 0
    # One GPU by itself, of the same row.
    alone_ms = forecast_of(alone(row), found.topology, found.rates).step_ms
    assert alone_ms == pytest.approx(120.0 + 240.0 + 8.0 + 30.0)
    # Where the step is shorter than without any contention, there is none.
    fast = calibrated([of_two(step_ms=300.0)], preset("h200x2"))
    assert fast.rates.contention == 0
    # Steps of other recipes, settings or plans tell nothing of it.
    for other in ({"case": "h200-long, 2 ranks"}, {"set": ["seed=2"]}, {"plan": "shard=2"}):
        same = calibrated([step_row(), of_two(**other)], preset("h200x2"))
        assert same.rates.contention == DEFAULT.contention


def test_calibration_finds_the_links_that_rows_were_made_with():
    # 0.05 ms and 100 GB/s: a gather of a rank's bytes between two sends them once.
    rows = [
        {
            "bench": "collectives",
            "collective": "all_gather",
            "ranks": 2,
            "given_bytes": 2**power,
            "ms": 0.05 + 2**power / 100e6,
        }
        for power in range(12, 30)
    ]
    found = calibrated(rows, preset("h200x2"))
    tier = found.topology.host_tier
    assert tier.gbytes_per_s * tier.collective_frac == pytest.approx(100.0)
    assert found.rates.launch_us + tier.latency_us == pytest.approx(50.0)
    assert found.rates.shares == DEFAULT.shares


def link_row(**given: object) -> str:
    row = {"bench": "collectives", "collective": "all_gather", "ranks": 2, "given_bytes": 4096}
    return json.dumps({**row, "ms": 0.05, **given}) + "\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "one JSON object a line; got line 1"),
        ('{"bench": "reader"}', "must hold a row of bench_step on one GPU.*got reader"),
        ("", "got no row"),
        (
            json.dumps(step_row(forward=1.0)),
            "must take longer than attention and copies of weights",
        ),
        (json.dumps(step_row(optimizer=2000.0)), "shares of the roofline of 0.02 or more"),
        (json.dumps(step_row(optimizer=0.0)), "hold whole rows.*ZeroDivisionError"),
        (json.dumps(step_row(tables=-1.0)), "hold whole rows.*table_factor"),
        (json.dumps(step_row(forward=float("nan"))), "must take longer than.*got nan ms"),
        ('{"bench": "step", "gpus": 1}', "hold whole rows.*KeyError: 'case'"),
        (link_row(), "collectives of several sizes.*got 1 in 1 rows"),
        (link_row() + link_row(given_bytes=9999, ms=1e-3), "got .* ms a byte"),
        (link_row() + link_row(given_bytes=9999, ms=0), "a time that is not above 0"),
        (link_row(ms="fast"), "hold whole rows.*TypeError"),
    ],
)
def test_calibration_refuses_what_explains_nothing(text, told, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=told):
        calibrated(read_rows(file), preset("h200"))


def test_calibration_file_has_to_be_there(tmp_path):
    with pytest.raises(ConfigError, match="--calibrate must be a file"):
        read_rows(tmp_path / "absent.jsonl")
