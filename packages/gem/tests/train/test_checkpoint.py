"""Checkpoints: complete or not there, whole on any number of ranks, refused where they differ."""

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from gem.train import checkpoint, checkpoint_writer
from gem.train.checkpoint import (
    TrainState,
    check_continues,
    latest_complete,
    load_checkpoint,
    read_manifest,
)
from gem.train.checkpoint_manifest import DamagedCheckpoint, write_manifest
from gem.train.checkpoint_writer import save_checkpoint
from gem.train.loop_state import LoopState
from gem.train.metrics import MetricStream
from gem_opkit.errors import ConfigError, DataError
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks


def make_state(seed: int, *, steps: int = 0) -> TrainState:
    """A toy of two optimizers, after some steps."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"dense": nn.Linear(3, 2), "table": nn.Embedding(5, 3)})
    model.register_buffer("counts", torch.tensor([seed, 2**40 + seed]))
    optimizers = {
        "dense": torch.optim.Adam(model["dense"].parameters(), lr=0.1),
        "tables": torch.optim.Adagrad(model["table"].parameters(), lr=0.1),
    }
    metrics = MetricStream(["click"], ["all"], window_blocks=2)
    for _ in range(steps):
        ids = torch.randint(5, (4,))
        loss = model["dense"](model["table"](ids)).square().sum()
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers.values():
            optimizer.step()
        rows = np.random.default_rng(seed).uniform(size=(6, 1)).astype(np.float32)
        zeros = np.zeros(6, np.int64)
        metrics.current.update(rows, np.round(rows), np.ones((6, 1), bool), zeros, zeros + seed)
        metrics.close(metrics.current)
    metrics.current.update(
        rows, np.round(rows), np.ones((6, 1), bool), zeros, zeros
    ) if steps else 0
    ema = {name: p.detach() + 1 for name, p in model.named_parameters() if "dense" in name}
    state = TrainState(model, optimizers, ema, metrics, steps, 10 * steps, {"flops": 3.0 * steps})
    state.loop = LoopState(loss_mean=steps / 3, skipped_steps=steps, best_ne=0.1 * seed)
    return state


def contents(state: TrainState):
    """Everything in a state, in a form that == compares."""
    return {
        "model": {k: v.tolist() for k, v in state.model.state_dict().items()},
        "optimizers": {
            name: [
                {key: torch.as_tensor(value).tolist() for key, value in entry.items()}
                for entry in optimizer.state_dict()["state"].values()
            ]
            for name, optimizer in state.optimizers.items()
        },
        "ema": {k: v.tolist() for k, v in state.ema.items()},
        "metrics": [
            block.report()
            for block in (state.metrics.lifetime, state.metrics.current, *state.metrics.recent)
        ],
        "scalars": (state.step, state.examples, state.counters),
        "loop": state.loop.to_json(),
    }


def save(folder, state, config, world=None, **changes):
    settings = {"dataset": "d1", "keep": 3, "current": state.metrics.current, **changes}
    return save_checkpoint(folder, state, config, world or World(), **settings)


def test_everything_comes_back(tiny, tmp_path):
    state = make_state(1, steps=3)
    expected = contents(state)
    folder = save(tmp_path, state, tiny())
    drawn = torch.rand(4)
    other = make_state(2, steps=1)
    assert contents(other) != expected
    load_checkpoint(folder, other, World())
    assert contents(other) == expected
    assert torch.equal(torch.rand(4), drawn)  # the random numbers go on where they were


def test_training_goes_on_as_if_nothing_had_happened(tiny, tmp_path):
    whole = make_state(1, steps=5)
    part = make_state(1, steps=2)
    folder = save(tmp_path, part, tiny())
    resumed = make_state(9)
    load_checkpoint(folder, resumed, World())
    for state in (resumed,):
        for _ in range(3):
            ids = torch.randint(5, (4,))
            loss = state.model["dense"](state.model["table"](ids)).square().sum()
            for optimizer in state.optimizers.values():
                optimizer.zero_grad()
            loss.backward()
            for optimizer in state.optimizers.values():
                optimizer.step()
    for kind in ("model", "optimizers"):
        assert contents(resumed)[kind] == contents(whole)[kind]


DAMAGE = {
    "no metadata": lambda folder: (folder / ".metadata").unlink(),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "manifest of nothing": lambda folder: (folder / "manifest.json").write_text('{"files": {}}'),
    "manifest without keys": lambda folder: (folder / "manifest.json").write_text(
        json.dumps(
            {"files": {".metadata": {"bytes": (folder / ".metadata").stat().st_size, "crc32": 0}}}
        )
    ),
    "manifest cut short": lambda folder: (folder / "manifest.json").write_text('{"files": {'),
    "data cut short": lambda folder: truncate(next(folder.glob("*.distcp"))),
    "data missing": lambda folder: next(folder.glob("*.distcp")).unlink(),
    "empty": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
    # One digit of a plausible manifest: the run would go on from another step.
    "step changed": lambda folder: change(folder / "manifest.json", b'"step": 3', b'"step": 2'),
}


def change(path, before, after):
    content = path.read_bytes()
    assert content.count(before) == 1
    path.write_bytes(content.replace(before, after))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(tiny, tmp_path, damage):
    for step in (2, 3):
        save(tmp_path, make_state(1, steps=step), tiny())
    assert latest_complete(tmp_path).name == "step-3"
    DAMAGE[damage](tmp_path / "step-3")
    assert latest_complete(tmp_path).name == "step-2"
    with pytest.raises(DataError, match="must be complete"):
        read_manifest(tmp_path / "step-3")


def test_none_that_is_complete_is_not_the_same_as_none_at_all(tiny, tmp_path):
    for step in (2, 3):
        DAMAGE["data cut short"](save(tmp_path, make_state(1, steps=step), tiny()))
    with pytest.raises(DataError, match=r"must hold a complete checkpoint.*got step-3, step-2"):
        latest_complete(tmp_path)
    shutil.rmtree(tmp_path / "step-2")
    (tmp_path / "step-3").rename(tmp_path / "partial-step-3")  # of a save that was killed
    assert latest_complete(tmp_path) is None


@pytest.mark.parametrize("moment", ["while saving", "before the rename"])
def test_a_save_that_dies_leaves_the_previous_checkpoint(tiny, tmp_path, monkeypatch, moment):
    save(tmp_path, make_state(1, steps=2), tiny())

    def die(*_, **__):
        (next(tmp_path.glob("partial-*")) / "half.distcp").write_bytes(b"half")
        raise KeyboardInterrupt

    if moment == "while saving":
        monkeypatch.setattr(checkpoint_writer.dcp, "save", die)
    else:
        monkeypatch.setattr(checkpoint_writer, "write_manifest", die)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, make_state(1, steps=3), tiny())
    monkeypatch.undo()
    assert latest_complete(tmp_path).name == "step-2"
    save(tmp_path, make_state(1, steps=4), tiny())
    assert latest_complete(tmp_path).name == "step-4"
    assert {path.name for path in tmp_path.iterdir()} == {"step-2", "step-4"}


def test_the_newest_by_number_is_chosen_not_by_name(tiny, tmp_path):
    for step in (9, 10):
        save(tmp_path, make_state(1, steps=step), tiny())
    assert latest_complete(tmp_path).name == "step-10"
    assert latest_complete(tmp_path / "nowhere") is None


def test_a_checkpoint_of_a_version_that_kept_no_loop_state_is_read(tiny, tmp_path):
    folder = save(tmp_path, make_state(1, steps=1), tiny())
    manifest = read_manifest(folder)
    del manifest["loop"]
    write_manifest(folder, manifest)
    state = make_state(2, steps=2)
    load_checkpoint(folder, state, World())
    assert (state.step, state.loop) == (1, LoopState())


def test_differing_keys_and_data_are_named(tiny, tmp_path):
    manifest = read_manifest(save(tmp_path, make_state(1, steps=1), tiny()))
    check_continues(manifest, tiny("train.keep_checkpoints=1"), "d1")
    with pytest.raises(ConfigError, match=r"seed: 2 here, 1 there; train\.tables\.lr: 0\.5 here"):
        check_continues(manifest, tiny("train.tables.lr=0.5", seed=2), "d1")
    with pytest.raises(DataError, match=r"the one that the run began with \(d1\); got d2"):
        check_continues(manifest, tiny(), "d2")
    # Any plan may go on, but one whose copies of tables learn otherwise.
    plan = "parallel.replicate=2", "model.embeddings.initial_rows=by_place"
    check_continues(manifest, tiny(*plan), "d1")
    with pytest.raises(ConfigError, match="table_replicas: 'weights' here, 'gradients' there"):
        check_continues(manifest, tiny(*plan, "parallel.table_replicas=weights"), "d1")


def test_another_model_is_refused_by_name(tiny, tmp_path):
    folder = save(tmp_path, make_state(1, steps=1), tiny())
    other = make_state(1)
    other.model.register_buffer("extra", torch.zeros(1))
    with pytest.raises(DataError, match=r"missing model/extra \[1\], unknown none"):
        load_checkpoint(folder, other, World())


def test_another_format_is_refused(tiny, tmp_path):
    folder = save(tmp_path, make_state(1, steps=1), tiny())
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(DataError, match=r"format of .*step-1 must be 2; got 99"):
        read_manifest(folder)


def save_on_rank(world, folder, config):
    state = make_state(1, steps=2)
    torch.manual_seed(world.rank)  # every rank draws numbers of its own
    save(folder, state, config, world)
    return torch.rand(2).tolist()


def load_on_rank(world, folder):
    state = make_state(5, steps=1)
    load_checkpoint(folder, state, world)
    found = contents(state)
    found["current"] = found["metrics"].pop(1)
    return found, torch.rand(2).tolist()


def test_two_ranks_save_and_other_numbers_of_ranks_load(tiny, tmp_path):
    drawn = run_ranks(save_on_rank, 2, tmp_path, tiny())
    expected = contents(make_state(1, steps=2))
    current = expected["metrics"].pop(1)
    empty = contents(make_state(1))["metrics"][1]
    counters = expected["scalars"]
    for world_size in (1, 2, 3, 4):
        ranks = (
            [load_on_rank(World(), tmp_path / "step-2")]
            if world_size == 1
            else run_ranks(load_on_rank, world_size, tmp_path / "step-2")
        )
        for rank, (found, _) in enumerate(ranks):
            # The sums that the ranks add up later are kept by one of them.
            assert found.pop("current") == (current if rank == 0 else empty)
            step, examples, own = found.pop("scalars")
            assert (step, examples) == counters[:2]
            assert own == (counters[2] if rank == 0 else {})
            assert found == {k: v for k, v in expected.items() if k != "scalars"}
        if world_size == 2:
            assert [numbers for _, numbers in ranks] == drawn


def test_a_full_disk_is_one_line_and_leaves_the_previous_checkpoint(tiny, tmp_path, monkeypatch):
    """The fault is raised where torch opens its file, so it takes torch's own way out."""
    save(tmp_path, make_state(1, steps=2), tiny())
    monkeypatch.setattr(dcp.filesystem.FileSystem, "create_stream", full_disk)
    with pytest.raises(DataError, match=r"must take another checkpoint; got .*No space left"):
        save(tmp_path, make_state(1, steps=3), tiny())
    monkeypatch.undo()
    assert latest_complete(tmp_path).name == "step-2"
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def full_disk(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_second_interrupt_during_a_save_stays_an_interrupt(tiny, tmp_path, monkeypatch):
    """torch wraps it into an error of its own, which would show as a crash."""

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(dcp.filesystem.FileSystem, "create_stream", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, make_state(1, steps=3), tiny())


class Ending(BaseException):
    """As the command line makes of SIGTERM."""


@pytest.mark.parametrize("ending", [KeyboardInterrupt, Ending])
def test_a_signal_during_a_load_is_no_damage(tiny, tmp_path, monkeypatch, ending):
    folder = save(tmp_path, make_state(1, steps=3), tiny())

    def interrupted(*args, **kwargs):
        raise ending

    monkeypatch.setattr(dcp.FileSystemReader, "read_data", interrupted)
    with pytest.raises(ending):
        load_checkpoint(folder, make_state(1), World())


def test_a_disk_that_cannot_be_read_is_no_damage(tiny, tmp_path, monkeypatch):
    """Nobody knows what it holds: it must be neither passed over nor put aside."""
    folder = save(tmp_path, make_state(1, steps=3), tiny())

    def broken(*args, **kwargs):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(dcp.FileSystemReader, "read_data", broken)
    with pytest.raises(
        DataError, match=r"step-3 must be readable; got OSError: \[Errno 5\]"
    ) as caught:
        load_checkpoint(folder, make_state(1), World())
    assert not isinstance(caught.value, DamagedCheckpoint)
    monkeypatch.undo()
    monkeypatch.setattr(Path, "read_text", broken)
    with pytest.raises(OSError, match="Input/output error"):
        latest_complete(tmp_path)


def test_other_faults_of_a_save_keep_their_traceback(tiny, tmp_path, monkeypatch):
    def bug(*args, **kwargs):
        raise RuntimeError("a bug")

    monkeypatch.setattr(dcp, "save", bug)
    with pytest.raises(RuntimeError, match="a bug"):
        save(tmp_path, make_state(1, steps=3), tiny())


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("place", [0, 0.5, -1])
def test_a_flipped_bit_that_keeps_the_size_is_named(tiny, tmp_path, name, place):
    """Sizes are as they were, and torch would load most of it without a word."""
    folder = save(tmp_path, make_state(1, steps=2), tiny())
    assert folder.joinpath(name).exists()
    flip_bit(folder / name, place)
    assert latest_complete(tmp_path) == folder
    state = make_state(1)
    before = contents(state)
    with pytest.raises(DataError) as caught:
        load_checkpoint(folder, state, World())
    assert f"checkpoint: {folder / name} must hold what was written (CRC-32 " in str(caught.value)
    assert f"; restore {folder} from a copy, or train again: no whole" in str(caught.value)
    assert contents(state) == before
    shutil.rmtree(folder)


@pytest.mark.parametrize("before", ["whole", "damaged", "none"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "unreadable"])
def test_a_damaged_checkpoint_is_to_be_removed_only_where_one_is_before_it(
    tiny, tmp_path, monkeypatch, before, damage
):
    if before != "none":
        earlier = save(tmp_path, make_state(1, steps=1), tiny())
    if before == "damaged":
        (earlier / "__0_0.distcp").write_bytes(b"")
    folder = save(tmp_path, make_state(1, steps=2), tiny())
    save(tmp_path, make_state(1, steps=3), tiny())  # a later one is none before it
    if damage == "flipped":
        flip_bit(folder / "__0_0.distcp", 0.5)
    elif damage == "cut":
        (folder / "__0_0.distcp").write_bytes(b"")
    else:
        monkeypatch.setattr(dcp, "load", fails)
    with pytest.raises(DataError) as caught:
        load_checkpoint(folder, make_state(1), World())
    removed = f"; remove {folder}, so that the checkpoint before it is used" in str(caught.value)
    assert removed == (before == "whole")
    assert ("no whole checkpoint is before it" in str(caught.value)) != removed


def fails(*args, **kwargs):
    raise RuntimeError("cannot be read")


def flip_bit(path, place):
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 0x10
    path.write_bytes(content)


def load_refused_on_rank(world, folder):
    try:
        load_checkpoint(folder, make_state(5), world)
    except DataError as fault:
        return str(fault)
    return None


def test_every_rank_refuses_what_one_of_them_found(tiny, tmp_path):
    folder = save(tmp_path, make_state(1, steps=2), tiny())
    assert len(read_manifest(folder)["files"]) == 2  # so each of two ranks reads one
    flip_bit(folder / "__0_0.distcp", 0.5)
    refusals = run_ranks(load_refused_on_rank, 2, folder)
    assert refusals[0] == refusals[1] is not None
    assert "__0_0.distcp must hold what was written" in refusals[0]


def test_damage_that_no_checksum_knows_of_is_named(tiny, tmp_path, monkeypatch):
    """Written so, with the checksum of what was written: by a fault of memory, or of torch."""
    monkeypatch.setattr(checkpoint, "check_content", lambda *_: None)
    folder = save(tmp_path, make_state(1, steps=2), tiny())
    path = folder / ".metadata"
    path.write_bytes(bytes(byte ^ 0xFF for byte in path.read_bytes()))
    with pytest.raises(DataError, match=r"step-2 must be readable; got .*; restore .*step-2"):
        load_checkpoint(folder, make_state(1), World())


def test_a_checkpoint_is_renamed_before_it_is_removed(tiny, tmp_path, monkeypatch):
    """A run that is killed in the middle of the removal must leave nothing that counts."""
    names = []
    remove = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path, **k: (names.append(path.name), remove(path)))
    for step in (1, 2, 3):
        save(tmp_path, make_state(1, steps=step), tiny(), keep=2)
    assert names == ["partial-step-1"]


def test_a_config_of_another_version_is_named(tiny, tmp_path):
    manifest = read_manifest(save(tmp_path, make_state(1, steps=2), tiny()))
    manifest["config"]["colour"] = 1
    with pytest.raises(ConfigError, match=r"this version .*; got unknown key 'colour'"):
        check_continues(manifest, tiny(), "data")
