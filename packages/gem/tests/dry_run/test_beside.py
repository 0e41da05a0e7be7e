"""`gem plan --dry-run`: the trainer's own step gives the bytes, and takes the memory, that is said.

The forecast adds up closed forms and never builds a model; the dry run builds everything and adds
up nothing. They share the recipe.
"""

import json

import pytest
from typer.testing import CliRunner

from gem import faults
from gem.cli import app
from gem.dry_run.beside import beside, beside_json, beside_text
from gem.planning.command import Asked, plan_recipe

# The whole model of h200 on narrow layers, and parameters that are cut all the same.
SMALL = (
    *("model.width=64", "model.stream.width=64", "model.stream.heads=2", "model.stream.seeds=32"),
    *("model.experts.mlp_widths=[256]", "model.experts.rank=16", "model.summary_tokens=16"),
    *("model.embeddings.embedding_dim=32", "data.streams.impressions.max_events=256"),
    *("data.synthetic.max_backlog_events=256", "model.heads.trunk_widths=[64]"),
)
PLANS = {
    "copies": ("replicate=4", "table_replicate=4"),
    "experts": (
        *("shard=2", "expert=2", "table_shard=2", "table_replicate=2", "keep_gathered=true"),
    ),
    "fully sharded": (
        *("shard=4", "table_shard=2", "table_replicate=2", "fully_sharded_tables=true"),
        *('table_replicas="gradients"', 'table_wire_dtype="bf16"', 'gather_dtype="bf16"'),
    ),
}
# What a forecast does not follow: which tensors are alive at the fullest moment.
MEMORY_BAND = 0.15
# One batch against the expectation over batches.
TABLES_BAND = 0.06


def compared(axes, gpus, *settings, batch=64, recipe="h200"):
    plan = [f"parallel.{axis}" for axis in (*axes, "replicate_below=1024")]
    plan.append("model.embeddings.initial_rows=by_place")
    asked = Asked(recipe, gpus, settings=(*settings, *plan), batch=batch, most=1)
    return beside(plan_recipe(asked))


@pytest.mark.parametrize("plan", PLANS)
def test_the_step_gives_the_bytes_of_the_forecast(plan):
    found = compared(PLANS[plan], 4, *SMALL)
    assert found.count.ranks == found.forecast.ranks == 4
    assert found.number_bytes <= 64
    axes = {line.axis for line in found.lines}
    assert len(found.lines) >= 2
    assert ("expert" in axes) == (plan == "experts")
    merged = ("table_replicate", "all_gather"), ("world", "all_gather")
    for line in found.lines:
        if line.axis == "table_shard":
            assert line.counted_bytes == pytest.approx(line.forecast_bytes, rel=TABLES_BAND), line
        elif (line.axis, line.collective) in merged and "fully_sharded" not in str(PLANS[plan]):
            # Gradients of the rows that a sharding group names: here all of it name the same.
            most = line.forecast_bytes * (1 + TABLES_BAND)
            assert (
                line.forecast_bytes / found.forecast.plan.table_shard * 0.94 <= line.counted_bytes
            )
            assert line.counted_bytes <= most, line
        elif line.axis == "table_replicate":
            assert line.counted_bytes == pytest.approx(line.forecast_bytes, rel=TABLES_BAND), line
        else:  # but for sums of 8 bytes that travel over the same axis
            assert 0 <= line.counted_bytes - line.forecast_bytes <= 64, line
    # Between steps: weights and both moments of Adam.
    held, memory = found.count.held_bytes, found.forecast.memory
    assert held["parameters"] == memory.parameters
    assert held["optimizer"] == pytest.approx(memory.optimizer, rel=1e-3)  # and counts of steps
    assert found.count.gradient_bytes == memory.all_gradients
    assert held["tables"] == pytest.approx(memory.tables, rel=0.02)  # rows are padded


def test_memory_at_the_fullest_is_that_of_the_forecast_at_full_size():
    found = compared(("replicate=1",), 1, batch=1024)
    peak = found.count.peak_bytes
    assert found.count.peak_section == "backward"
    assert peak == pytest.approx(found.forecast.memory.total, rel=MEMORY_BAND)


def test_thousands_of_ranks_in_one_process():
    axes = ("replicate=512", "shard=4", "expert=2", "table_shard=64", "table_replicate=64")
    found = compared(axes, 4096, *SMALL, batch=16)
    assert found.count.ranks == 4096
    shown = beside_text(found)
    assert "dry run of rank 0 of 4096" in shown
    told = beside_json(found)
    assert json.loads(json.dumps(told)) == told
    assert {each["axis"] for each in told["collectives"]} >= {"replicate", "shard", "expert"}
    links = {each["axis"]: each["links"] for each in told["collectives"]}
    assert links["expert"] == "nvlink"
    assert links["world"] != "nvlink"


def test_the_command_shows_both():
    words = ["plan", "h200", "--gpus", "2", "--batch", "8", "--plans", "1", "--dry-run", "--json"]
    words += [f"--set={setting}" for setting in SMALL]
    done = CliRunner().invoke(app, words, obj=faults.Asked())
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["dry_run"]["plan"] == told["plans"][0]["plan"]
    assert told["dry_run"]["collectives"]
