"""What a run records for its report, against counts made from files and weights directly."""

import json
from bisect import bisect_left
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as dcp
from html_page import read_json

from gem.data.prepare import default_folder
from gem.data.reader import open_reader
from gem.model.build import build_model
from gem.report.compare import wilson
from gem.train.auc import AucState
from gem.train.diagnostics import command_line
from gem.train.history_counts import HistoryCounts
from gem.train.reliability import reliability_groups
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks


@pytest.fixture(scope="module")
def found(runs):
    return read_json(runs / "one" / "diagnostics.json")


@pytest.fixture(scope="module")
def data(tiny, data_root, runs):
    return default_folder(tiny().data, data_root)


def column_lists(folder):
    return pq.read_table(folder).to_pydict()


def test_history_lengths_are_those_of_the_files(found, data):
    """Events of the user strictly before the example, at most what is read; training rows only."""
    examples = column_lists(data / "examples")
    for stream, most in (("clicks", 6), ("impressions", 8)):
        events = column_lists(data / "events" / stream)
        times = {}
        for user, time in zip(events["user_id"], events["time_ms"], strict=True):
            times.setdefault(user, []).append(time)
        for of_user in times.values():
            of_user.sort()
        rows = zip(examples["user_id"][:320], examples["time_ms"][:320], strict=True)
        expected = Counter(min(most, bisect_left(times.get(user, []), time)) for user, time in rows)
        assert found["histories"][stream] == sorted([n, c] for n, c in expected.items())


def test_times_are_those_of_the_files(runs, found, data):
    times = column_lists(data / "examples")["time_ms"]
    splits = found["data"]["splits"]
    for name, start, stop in (("train", 0, 320), ("valid", 320, 360), ("test", 360, 400)):
        assert splits[name] == {
            "examples": stop - start,
            "first_ms": times[start],
            "last_ms": times[stop - 1],
        }
    log = (runs / "one" / "metrics.jsonl").read_text().splitlines()
    for line in log[:5]:
        row = json.loads(line)
        assert row["time_ms"] == times[row["examples"] - 1]


def test_rows_trained_are_those_whose_weights_moved(found, runs, tiny, data):
    config = tiny(seed=1)
    schema = open_reader(data, config.data, batch_size=32).schema
    torch.manual_seed(config.seed)
    model = build_model(config.model, schema)
    before = {
        name.removeprefix("tables.weights."): weight.detach()
        for name, weight in model.named_parameters()
    }
    for table, facts in found["tables"].items():
        name = f"model/tables.weights.{table}"
        after = {name: torch.empty_like(before[table])}
        reader = dcp.FileSystemReader(runs / "one" / "checkpoints" / "step-10")
        dcp.load(after, storage_reader=reader, no_dist=True)
        moved = (after[name] != before[table]).any(dim=1)
        assert facts["rows_trained"] == int(moved.sum())
        assert 0 < facts["rows_trained"] <= facts["rows"] == len(moved)
        norms = np.linalg.norm(after[name].numpy().astype(np.float64), axis=1)
        for key, mask in (("norm_trained", moved.numpy()), ("norm_untrained", ~moved.numpy())):
            if not mask.any():
                assert facts[key] is None
                continue
            assert facts[key]["mean"] == pytest.approx(norms[mask].mean(), rel=1e-12)
            assert facts[key]["max"] == pytest.approx(norms[mask].max(), rel=1e-12)
        assert facts["weight_bytes"] == 4 * after[name].numel()
        assert facts["optimizer_bytes"] == 4 * len(moved) + 8  # a sum a row, and the step
        assert facts["out_of_range"] == 0


def test_parameters_are_counted_by_part(found):
    counts = found["model"]["parameters"]
    assert sum(counts["dense_by_part"].values()) == counts["dense"]
    assert counts["tables"] == sum(t["rows"] * t["width"] for t in found["tables"].values())


def test_reliability_holds_every_example_of_the_summary(found, runs):
    summary = read_json(runs / "one" / "summary.json")
    for period in ("progressive", "valid", "test"):
        for task, metrics in summary[period].items():
            here = found["reliability"][period][task]
            for groups, of in (
                (here["all"]["groups"], metrics),
                *((here["domains"][d]["groups"], m) for d, m in metrics["domains"].items()),
            ):
                assert sum(g["examples"] for g in groups) == of["examples"]
                assert sum(g["positives"] for g in groups) == of["positives"]
                if of["calibration"] is not None:
                    total = sum(g["examples"] * g["predicted"] for g in groups)
                    assert total == pytest.approx(of["calibration"] * of["positives"], rel=1e-9)


@pytest.mark.parametrize("ties", [None, 2])
def test_reliability_groups_are_those_of_the_sorted_examples(rng, ties):
    score = rng.beta(2, 5, size=3001).astype(np.float32)
    if ties is not None:
        score = np.round(score, ties).astype(np.float32)
    positive = rng.random(3001) < score
    parts = np.array_split(rng.permutation(3001), 4)
    results = []
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        whole = AucState()
        for part in order:
            state = AucState()
            state.update(score[parts[part]], positive[parts[part]])
            whole.merge(state)
        results.append(reliability_groups(whole))
    assert results[0] == results[1]
    groups = results[0]["groups"]
    assert len(groups) == 15
    ends = 0
    for group in groups:
        inside = (score >= np.float32(group["low"])) & (score <= np.float32(group["high"]))
        assert group["examples"] == inside.sum()
        assert group["positives"] == positive[inside].sum()
        assert group["predicted"] == pytest.approx(score[inside].astype(float).mean(), rel=1e-12)
        ends += inside.sum()
    assert ends == 3001
    if ties is None:
        assert {g["examples"] for g in groups} == {200, 201}


def test_reliability_survives_dropped_bits(rng):
    score = rng.random(4000).astype(np.float32)
    state = AucState(max_bins=256)
    state.update(score, score > 0.5)
    assert state.to_arrays()["dropped_bits"][0] > 0
    groups = reliability_groups(state)["groups"]
    assert sum(g["examples"] for g in groups) == 4000
    mean = sum(g["examples"] * g["predicted"] for g in groups) / 4000
    assert mean == pytest.approx(score.astype(float).mean(), rel=0.02)


def test_reliability_says_why_there_is_none():
    empty = reliability_groups(AucState())
    assert empty == {"groups": [], "null_reason": "no labelled examples"}
    state = AucState()
    state.update(np.array([0.5], np.float32), np.array([True]))
    assert reliability_groups(state, fractional=True)["null_reason"] == "labels are not all 0 or 1"


def count_on_rank(world, config, data):
    reader = open_reader(data, config.data, batch_size=33, rank=world.rank, world_size=world.size)
    counts = HistoryCounts(reader.schema.streams)
    for batch in reader.batches("train"):
        counts.add(batch)
    whole = counts.merged(world).counts
    assert whole is not None
    return {name: part.tolist() for name, part in whole.items()}


def test_history_counts_of_ranks_add_up(tiny, data):
    alone = count_on_rank(World(), tiny(), data)
    assert sum(alone["clicks"]) == 320
    assert run_ranks(count_on_rank, 2, tiny(), data) == [alone] * 2


def test_counts_of_a_checkpoint_without_them_stay_unknown(tiny, data):
    streams = open_reader(data, tiny().data, batch_size=32).schema.streams
    counts = HistoryCounts(streams)
    counts.load({}, keep=True)
    assert counts.counts is None
    assert counts.tensors() == {}
    assert counts.merged(World()).counts is None


@pytest.mark.parametrize(("positives", "examples"), [(0, 7), (3, 7), (7, 7), (250, 1000)])
def test_the_interval_of_a_rate_solves_its_equation(positives, examples):
    """Wilson's ends are where the rate is z standard errors of that end away from it."""
    rate = positives / examples
    for end in wilson(positives, examples):
        squared = (rate - end) ** 2
        assert squared == pytest.approx(1.959964**2 * end * (1 - end) / examples, abs=1e-12)


def test_the_command_is_what_a_person_types():
    assert command_line(["/x/bin/gem", "train", "a b"]) == "gem train 'a b'"
    assert command_line(["/x/site-packages/gem/__main__.py", "train"]) == "gem train"
    assert command_line(["/x/pytest", "-q"]) == "from Python, by pytest"
