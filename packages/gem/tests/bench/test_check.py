"""Kernels that train as the references do pass the check, and others do not."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import gem.bench.endure
from gem.bench.asked import Asked, recipe_of
from gem.bench.check import CheckReport, check, compare, planted_batch, trajectory
from gem.bench.command import check_text, endured_text
from gem.bench.endure import endure
from gem.bench.rows import write_check, write_endured
from gem.planning.schema import declared_schema
from gem_opkit.errors import UnsupportedError
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks

ASKED = Asked("synthetic-debug", settings=("train.dense.lr=1e-2",), examples=64, steps=20)


@pytest.fixture(scope="module")
def exact():
    return trajectory(ASKED, World(), precision="fp32", impl="reference")


def test_the_planted_signal_is_learned(exact):
    first, last = sum(exact.losses[:5]), sum(exact.losses[-5:])
    assert last < 0.95 * first
    assert set(exact.ne) == {"click", "conversion"}


def test_a_batch_is_the_same_in_every_run():
    config = recipe_of(ASKED, World())
    schema = declared_schema(config)
    one, same, other = (planted_batch(config, schema, n) for n in (3, 3, 4))
    assert torch.equal(one.labels_BA, same.labels_BA)
    assert not torch.equal(one.labels_BA, other.labels_BA)
    gaps = one.streams["clicks"].gap_seconds
    assert torch.equal(gaps.values, same.streams["clicks"].gap_seconds.values)


def test_runs_that_agree_pass_and_others_do_not(exact):
    reference = trajectory(ASKED, World(), precision="bf16_autocast", impl="auto")
    assert reference.losses != exact.losses
    good = compare(ASKED, World(), (exact, reference, reference))
    assert (good.agrees, good.said) == (True, "")
    assert check_text(good).endswith("the kernels agree\n")
    # Gradients that are a fifth too large, to which Adam would be blind but for its rate.
    asked = replace(ASKED, settings=("train.dense.lr=1.2e-2",))
    wrong = trajectory(asked, World(), precision="bf16_autocast", impl="auto")
    bad = compare(ASKED, World(), (exact, reference, wrong))
    assert not bad.agrees
    assert "over the budget" in bad.said
    broken = exact.model_copy(update={"ne": dict.fromkeys(exact.ne, 2.0)})
    assert "NE" in compare(ASKED, World(), (exact, reference, broken)).said
    later = reference.model_copy(update={"further_losses": (1.0, None, 2.0)})
    not_finite = compare(ASKED, World(), (exact, reference, later))
    assert not_finite.said == "loss of the kernels is not finite in step 21"
    assert not not_finite.agrees


def test_steps_behind_the_compared_ones_are_no_part_of_them():
    asked = replace(ASKED, settings=(), examples=16, steps=3)
    whole = trajectory(replace(asked, steps=5), World(), precision="fp32", impl="auto")
    found = trajectory(asked, World(), precision="fp32", impl="auto", further=2)
    assert (found.losses, found.further_losses) == (whole.losses[:3], whole.losses[3:])
    assert found.ne.keys() == whole.ne.keys()
    assert found.ne != whole.ne


def test_a_row_of_a_comparison(exact, tmp_path):
    write_check(tmp_path, compare(ASKED, World(), (exact, exact, exact)))
    (line,) = (tmp_path / "cpu" / "step_check.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert (row["bench"], row["agrees"], row["steps"]) == ("step_check", True, 20)
    assert row["case"] == "synthetic-debug, 20 steps of 64"


def test_a_cpu_has_nothing_to_compare():
    with pytest.raises(UnsupportedError, match="--check must run in one process on a GPU"):
        check(ASKED, World())


def test_a_long_run_stays_finite_or_says_where_not(tmp_path, monkeypatch):
    monkeypatch.setattr(gem.bench.endure, "_EVERY", 4)
    asked, told = replace(ASKED, examples=16, steps=10), []
    good = endure(asked, World(), told=told.append)
    assert (good.finite, good.said, good.steps) == (True, "", 10)
    assert [line.split(" in ")[0] for line in told] == ["model", "4 steps", "8 steps", "10 steps"]
    write_endured(tmp_path, good)
    (line,) = (tmp_path / "cpu" / "step_endure.jsonl").read_text().splitlines()
    assert json.loads(line)["case"] == "synthetic-debug, 10 steps of 16"

    def spoilt(config, schema, number):
        batch = planted_batch(config, schema, number)
        batch.numbers_BD[0] = float("nan") if number == 5 else 0.0
        return batch

    monkeypatch.setattr(gem.bench.endure, "planted_batch", spoilt)
    bad = endure(asked, World())
    # The losses are looked at together, so the steps behind it were taken.
    assert (bad.finite, bad.said, bad.steps) == (False, "the loss of step 5 is nan", 8)
    assert bad.loss_last is None
    assert endured_text(bad).endswith("the loss of step 5 is nan\n")


def endure_on_a_rank(world):
    """One rank's batch of step 2 has a NaN; a rank that went on alone would wait for ever."""
    gem.bench.endure._EVERY = 2
    drawn: list[tuple[int, int]] = []

    def spoilt(config, schema, number):
        batch = planted_batch(config, schema, number)
        drawn.append((number, batch.examples))
        batch.numbers_BD[0] = float("nan") if number == 5 else 0.0
        return batch

    gem.bench.endure.planted_batch = spoilt
    asked = replace(ASKED, plan=("replicate=2", "table_replicate=2"), examples=8, steps=10)
    return endure(asked, world).model_dump(exclude={"seconds"}), drawn[:3]


def test_ranks_of_a_long_run_have_batches_of_their_own_and_end_together():
    (first, drawn), (second, others) = run_ranks(endure_on_a_rank, 2)
    assert first == second
    assert (first["finite"], first["steps"], first["examples"]) == (False, 4, 16)
    assert first["said"] == "the loss of step 2 is nan"
    assert (drawn, others) == ([(0, 8), (2, 8), (4, 8)], [(1, 8), (3, 8), (5, 8)])


@pytest.mark.gpu
def test_kernels_train_as_the_references_do(tmp_path):
    """In a process of its own, as models are drawn on the device there."""
    words = ("synthetic-debug", "--check", "6", "--endure", "2", "--examples", "32", "--json")
    command = [sys.executable, "-m", "gem", "bench", "step", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = CheckReport.model_validate_json(done.stdout)
    assert found.agrees, found.said
    assert (len(found.kernels.losses), len(found.kernels.further_losses)) == (6, 2)
    assert found.kernels.losses != found.reference.losses  # so the kernels ran
