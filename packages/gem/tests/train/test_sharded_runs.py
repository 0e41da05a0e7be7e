"""Whole runs under plans that shard: stopped, resumed under other plans, evaluated, refused."""

import errno
import json
import math
import shutil
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file

from gem.config import RunConfig
from gem.train import checkpoint_writer, loop, run
from gem.train.export_weights import export_weights
from gem.train.held_out import evaluate_folder
from gem.train.interrupt import Interrupted
from gem.train.loop import train
from gem.train.run_folder import CHECKPOINTS
from gem.train.run_log import METRICS_FILE
from gem.train.step import TrainStep
from gem_opkit.errors import ConfigError, DataError, UnsupportedError
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks

SETTINGS = [
    *("model.dropout=0.0", "model.embeddings.initial_rows=by_place", "model.experts.count=4"),
    *("train.accumulation_parts=2", "train.guard.nonfinite=skip", "train.interim.every_steps=3"),
    *("train.log_every_steps=1", "model.embeddings.out_of_range=clamp"),
]
SHARED = ["parallel.replicate_below=40", "parallel.table_sharding.item=['row_wise']"]
ON_FOUR = [
    *("parallel.shard=2", "parallel.expert=2", "parallel.table_shard=2"),
    *("parallel.fully_sharded_tables=true", *SHARED),
]
ON_TWO = ["parallel.shard=2", "parallel.table_shard=2", *SHARED]
BAD_ROW = 100  # of the fourth step
take_step = TrainStep.__call__


def spoiling(self, batch, step):
    if (batch.row_B == BAD_ROW).any():
        batch.numbers_BD.masked_fill_((batch.row_B == BAD_ROW)[:, None], math.nan)
    return take_step(self, batch, step)


def leg(world: World, config: RunConfig, folder, data_root, stop_at: int) -> str:
    """A part of a run, up to a step."""

    @contextmanager
    def these_ranks(_):
        yield world

    loop.process_group = these_ranks
    loop._agreed = lambda run, _: 15 * (run.state.step == stop_at)
    TrainStep.__call__ = spoiling
    with pytest.raises(Interrupted) as end:
        train(config, folder, resume=True, data_root=data_root)
    return str(end.value)


def rows(folder):
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tiny, data_root, tmp_path_factory):
    """The run of one process; and the same, on one up to step 2 and on 4 ranks up to step 7."""
    root = tmp_path_factory.mktemp("sharded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "__call__", spoiling)
        summary = train(tiny(*SETTINGS), root / "whole", data_root=data_root)
        patch.setattr(loop, "_agreed", lambda run, _: 15 * (run.state.step == 2))
        with pytest.raises(Interrupted):
            train(tiny(*SETTINGS), root / "four", data_root=data_root)
    config = tiny(*SETTINGS, *ON_FOUR)
    ends = run_ranks(leg, 4, config, root / "four", data_root, 7)
    assert ends == ["stopped by signal 15 after step 7"] * 4
    return root, summary


def steps(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / CHECKPOINTS).iterdir())


def test_a_run_goes_on_under_other_plans_and_on_one_rank(whole, tiny, data_root, tmp_path):
    root, expected = whole
    part = tmp_path / "run"
    shutil.copytree(root / "four", part)
    assert steps(part) == [2, 3, 6, 7]
    # From the one that was written in the background, with its four parts.
    shutil.rmtree(part / CHECKPOINTS / "step-7")
    config = tiny(*SETTINGS, *ON_TWO)
    ends = run_ranks(leg, 2, config, part, data_root, 8)
    assert ends == ["stopped by signal 15 after step 8"] * 2
    again = train(tiny(*SETTINGS), part, resume=True, data_root=data_root)
    assert again["training"] == pytest.approx(expected["training"], rel=1e-5)
    assert again["training"]["skipped_steps"] == 1
    for period in ("progressive", "valid", "test"):
        for key in ("examples", "positives", "ne", "auc"):
            assert again[period]["click"][key] == pytest.approx(expected[period]["click"][key])
    found, wanted = rows(part), rows(root / "whole")
    assert [(r["step"], r.get("interim")) for r in found] == [
        (r["step"], r.get("interim")) for r in wanted
    ]
    for key in ("loss", "grad_norm"):
        values = [
            {r["step"]: r[key] for r in some if r.get(key) is not None} for some in (found, wanted)
        ]
        assert len(values[0]) == 9  # none of the step that was skipped
        assert values[0] == pytest.approx(values[1], rel=1e-5), key
    for ours, theirs in zip(found, wanted, strict=True):
        for table, counts in ours.get("tables", {}).items():
            other = theirs["tables"][table]
            # Each rank of a step counts its own different rows.
            assert counts.pop("unique") >= other.pop("unique") > 0
            assert counts == other
    facts = [json.loads((f / "diagnostics.json").read_text()) for f in (part, root / "whole")]
    assert facts[0]["model"] == facts[1]["model"]
    assert facts[0]["histories"] == facts[1]["histories"]


def test_what_four_ranks_have_written_is_read_by_one_process(whole, data_root, tmp_path):
    root, _ = whole
    folders = [root / name / CHECKPOINTS / "step-6" for name in ("four", "whole")]
    assert len(list(folders[0].glob("*.distcp"))) == 4
    four, one = (evaluate_folder(folder, data_root=data_root) for folder in folders)
    for split in ("valid", "test"):
        for key in ("ne", "logloss", "calibration"):
            found, wanted = four[split]["click"][key], one[split]["click"][key]
            assert found == pytest.approx(wanted, rel=1e-5)
    for name, folder in zip(("four", "one"), folders, strict=True):
        export_weights(folder, tmp_path / name)
    ours, theirs = load_file(tmp_path / "four"), load_file(tmp_path / "one")
    assert ours.keys() == theirs.keys()
    assert any("experts.experts.3" in name for name in ours)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6)
    facts = [json.loads((root / "four" / "diagnostics.json").read_text())]
    table = facts[0]["tables"]["item"]
    assert (table["rows"], table["weight_bytes"]) == (31, 31 * 4 * 4)
    assert 0 < table["rows_trained"] <= 31


def test_a_part_that_is_missing_is_refused_by_name(whole, tiny, data_root, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole[0] / "four", run)
    for step in (2, 3, 6):
        shutil.rmtree(run / CHECKPOINTS / f"step-{step}")
    (run / CHECKPOINTS / "step-7" / "__2_0.distcp").unlink()
    with pytest.raises(DataError, match=r"must hold a complete checkpoint.*got step-7 with files"):
        train(tiny(*SETTINGS), run, resume=True, data_root=data_root)
    with pytest.raises(DataError, match=r"step-7 must be complete.*got a folder where some"):
        evaluate_folder(run / CHECKPOINTS / "step-7", data_root=data_root)


def other_views(world: World, config: RunConfig, folder, data_root) -> list[str]:
    """What is said where the second rank's host does not see what the first one sees."""

    @contextmanager
    def these_ranks(_):
        yield world

    loop.process_group = these_ranks
    newest_first = run.newest_first

    def without_last(checkpoints):
        return (one for one in newest_first(checkpoints) if one[0].name != "step-7")

    def cut_short(checkpoints):
        return ((one, whole and one.name != "step-7") for one, whole in newest_first(checkpoints))

    def broken(checkpoints):
        raise OSError(errno.EIO, "Input/output error")
        yield checkpoints

    said = []
    for view in (without_last, cut_short, broken):
        run.newest_first = view if world.rank == 1 else newest_first
        with pytest.raises((DataError, OSError)) as fault:
            train(config, folder, resume=True, data_root=data_root)
        said.append(str(fault.value))
    return said


def test_ranks_that_see_other_checkpoints_begin_no_run(whole, tiny, data_root, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole[0] / "four", folder)
    before = steps(folder)
    first, second = run_ranks(other_views, 2, tiny(*SETTINGS, *ON_TWO), folder, data_root)
    assert first[:2] == second[:2]
    assert "must hold the same for every rank; got step-7 for rank 0 and step-6" in first[0]
    assert "got step-7 for rank 0 and step-7 with files missing for rank 1" in first[1]
    assert "rank 1 must look for the newest checkpoint; got OSError" in first[2]
    assert "Input/output error" in second[2]
    assert steps(folder) == before


def test_an_engine_of_one_process_is_resumed_bit_for_bit(tiny, data_root, tmp_path):
    config = tiny("model.embeddings.initial_rows=by_place", "parallel.table_engine=torch")
    train(config, tmp_path / "whole", data_root=data_root)
    part = tmp_path / "part"
    shutil.copytree(tmp_path / "whole", part)
    for step in (6, 9, 10):
        shutil.rmtree(part / CHECKPOINTS / f"step-{step}")
    train(config, part, resume=True, data_root=data_root)
    # And it is the run whose tables are parameters.
    train(tiny("model.embeddings.initial_rows=by_place"), tmp_path / "local", data_root=data_root)
    seen = [
        [{k: row.get(k) for k in ("loss", "grad_norm", "tables", "metrics")} for row in rows(f)]
        for f in (part, tmp_path / "whole", tmp_path / "local")
    ]
    assert seen[0] == seen[1] == seen[2]


def full_disk(world: World, config: RunConfig, folder, data_root):
    """The disk of the second rank takes no second part; then a batch of its has a wrong id."""

    @contextmanager
    def these_ranks(_):
        yield world

    loop.process_group = these_ranks
    write = checkpoint_writer.dcp.FileSystemWriter.write_data

    def refused(self, *given):
        if "step-6" in str(self.path) and world.rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *given)

    checkpoint_writer.dcp.FileSystemWriter.write_data = refused

    def wrong_id(self, batch, step):
        if step == 7 and world.rank == 1:
            batch.ids["item_id"].values[0] = 10**6
        return take_step(self, batch, step)

    TrainStep.__call__ = wrong_id
    with pytest.raises(DataError) as fault:
        train(config, folder, data_root=data_root)
    return str(fault.value)


def test_what_one_rank_runs_into_ends_all(tiny, data_root, tmp_path):
    settings = [s for s in SETTINGS if "out_of_range" not in s]
    stop = tiny(*settings, *ON_TWO)
    ends = run_ranks(full_disk, 2, stop, tmp_path / "stop", data_root)
    assert "No space left on device" in ends[1]
    assert "rank 1 must write its part" in ends[0] or "No space left on device" in ends[0]
    assert steps(tmp_path / "stop") == [3]
    # With the other setting it goes on, to the batch that nobody can look up.
    go_on = tiny(*settings, *ON_TWO, "train.checkpoint_failure=go_on")
    ends = run_ranks(full_disk, 2, go_on, tmp_path / "go_on", data_root)
    assert "1000000" in ends[1]
    assert "refusal by rank 1" in ends[0]
    assert steps(tmp_path / "go_on") == [3]


def test_a_plan_follows_the_ranks_where_it_may(tiny):
    plan = tiny(*ON_FOUR[:3], "model.embeddings.initial_rows=by_place").parallel
    assert (plan.table_replicate, plan.tables_are_local) == (2, False)
    with pytest.raises(ConfigError, match=r"must be the world size 8; got 1 \* 2 \* 2 = 4"):
        plan.on_ranks(8)
    follows = plan.model_copy(update={"follow_ranks": True})
    wider = follows.on_ranks(8)
    assert (wider.replicate, wider.table_replicate, wider.world_size) == (2, 4, 8)
    with pytest.raises(ConfigError, match=r"that shard=2 \* expert=2 divides; got 6"):
        follows.on_ranks(6)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["parallel.shard=2", "parallel.table_shard=2"], 'initial_rows must be "by_place"'),
        (["parallel.table_shard=2"], "replicate=1 * shard=1 * expert=1 = 1"),
        (["parallel.shard=2", "parallel.table_shard=2", "parallel.table_engine=local"], "local"),
        (["parallel.shard=0"], "'parallel.shard'"),
        (["parallel.table_sharding.user=[]"], "parallel.table_sharding.user must name a way"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_by_key(tiny, overrides, words):
    with pytest.raises(ConfigError) as fault:
        tiny(*overrides)
    assert words in str(fault.value)


def test_what_is_not_there_is_refused_by_key(tiny, data_root, tmp_path):
    placed = ["model.embeddings.initial_rows=by_place"]
    with pytest.raises(UnsupportedError, match=r"parallel\.table_engine must be .*torchrec"):
        train(tiny(*placed, "parallel.table_engine=torchrec"), tmp_path, data_root=data_root)
    wrong = ["parallel.table_engine=torch", "parallel.table_sharding.itm=['row_wise']"]
    with pytest.raises(ConfigError, match=r"parallel\.table_sharding.*'itm'; did you mean 'item'"):
        train(tiny(*placed, *wrong), tmp_path, data_root=data_root)
