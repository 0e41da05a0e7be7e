"""Rows of packages/gem/benchmarks/bench_step.py on two ranks, and the ways of one rank."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from gem_parallel.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
SECTIONS = {"data", "forward", "backward", "tables", "optimizer", "other"}


def bench(world, out):
    script = import_module("bench_step")
    words = ["--recipe", "synthetic-debug", "--device", "cpu", "--examples", "64", "--alone"]
    words += ["--steps", "2", "--warmup", "1", "--out", str(out)]
    words += ["--each", "replicate=2 table_shard=2", "replicate=2"]
    words += ["--also", "synthetic-debug seed=2"]
    script.run(script.arguments(words), world)


def test_rows_of_two_ranks_keep_the_sections_of_each_by_itself(tmp_path):
    run_ranks(bench, 2, tmp_path)
    folder = tmp_path / "cpux2"
    rows = [json.loads(line) for line in (folder / "step.jsonl").read_text().splitlines()]
    other = json.loads((folder / "step_set.jsonl").read_text())
    assert [row["plan"] for row in rows] == ["replicate=2 table_shard=2", "replicate=2"]
    assert other["set"] == ["seed=2"]
    for row in (*rows, other):
        assert set(row["alone_sections_ms"]) >= SECTIONS - {"data", "other"}
        assert set(row["alone_sections_ms"]) <= SECTIONS
        assert all(len(each) == 2 for each in row["alone_sections_ms"].values())
        sums = [sum(each[rank] for each in row["alone_sections_ms"].values()) for rank in (0, 1)]
        # Two timed steps, whose median is their mean; sections follow one another.
        assert sums == pytest.approx(row["alone_step_ms"], rel=0.02)
    # One measurement a recipe and its settings, and another one with others.
    assert rows[0]["alone_step_ms"] == rows[1]["alone_step_ms"] != other["alone_step_ms"]


def test_ways_of_one_rank_run_without_a_gpu(monkeypatch, tmp_path, capsys):
    script = import_module("bench_one_rank")
    words = ["--recipe", "synthetic-debug", "--examples", "32", "--table-rows", "200"]
    words += ["--rounds", "1", "--steps", "2", "--out", str(tmp_path), "--ways", "replicate"]
    words += ["shard", "--set", "precision.default=bf16_autocast"]
    words += ["--set", "parallel.gather_dtype=bf16", "--set", "parallel.keep_gathered=true"]
    monkeypatch.setattr(sys, "argv", ["bench_one_rank.py", *words])
    script.main()
    text = (tmp_path / "cpu" / "one_rank.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["way"] for row in rows] == ["replicate", "shard"]
    for row in rows:
        assert row["slower_ms"] == pytest.approx(row["step_ms"] - row["single"]["step_ms"])
        assert row["lookups"] == 5  # three before anything is timed, two of the round
    # Batches are the same, and so is what is learned from the first of them.
    assert rows[0]["losses"] == pytest.approx(rows[0]["single"]["losses"], rel=1e-2)
    assert len(rows[0]["losses"]) == 2
