"""A damaged checkpoint costs the steps since the one before it, and nothing else."""

import io
import shutil

import pytest
from rich.console import Console

from gem.train.loop import train
from gem.train.progress import Display
from gem.train.run_folder import CHECKPOINTS
from gem_opkit.errors import ConfigError, DataError

SHOWN = ("progressive", "valid", "test", "steps", "examples", "training")


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def resumed(tiny, folder, data_root):
    printed = io.StringIO()
    display = Display(Console(file=printed, width=10_000))
    summary = train(tiny(), folder, resume=True, display=display, data_root=data_root)
    return summary, printed.getvalue()


@pytest.mark.parametrize("damage", [flip_bit, truncate])
def test_the_one_before_it_is_taken(tiny, unbroken, data_root, tmp_path, damage):
    folder = tmp_path / "run"
    shutil.copytree(unbroken[0], folder)
    checkpoints = folder / CHECKPOINTS
    damage(checkpoints / "step-10" / "__0_0.distcp")
    flip_bit(checkpoints / "step-9" / ".metadata")
    summary, printed = resumed(tiny, folder, data_root)
    assert {k: summary[k] for k in SHOWN} == {k: unbroken[1][k] for k in SHOWN}
    for step in (9, 10):
        name = checkpoints / f"step-{step}"
        line = f"warning: {name} is damaged (files missing, changed or cut short) and is now "
        assert f"{line}damaged-step-{step}; the one before it is taken\n" in printed
    assert f"continue from {checkpoints / 'step-6'}: step 6 of 10" in printed
    names = {path.name for path in checkpoints.iterdir()}
    assert names == {*(f"step-{n}" for n in (3, 6, 9, 10)), "damaged-step-9", "damaged-step-10"}
    good = (unbroken[0] / CHECKPOINTS / "step-10" / "__0_0.distcp").read_bytes()
    assert (checkpoints / "step-10" / "__0_0.distcp").read_bytes() == good


def test_nothing_is_moved_where_none_is_whole(tiny, unbroken, data_root, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(unbroken[0], folder)
    log = (folder / "metrics.jsonl").read_bytes()
    for path in (folder / CHECKPOINTS).glob("*/__0_0.distcp"):
        flip_bit(path)
    with pytest.raises(
        DataError, match=r"must hold a complete checkpoint.*step-10, step-9, step-6"
    ):
        train(tiny(), folder, resume=True, data_root=data_root)
    names = {path.name for path in (folder / CHECKPOINTS).iterdir()}
    assert names == {f"step-{n}" for n in (3, 6, 9, 10)}
    assert (folder / "metrics.jsonl").read_bytes() == log


def test_other_settings_are_no_damage(tiny, unbroken, data_root, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(unbroken[0], folder)
    (folder / "config.toml").write_text(tiny("train.dense.lr=0.5").to_toml())
    with pytest.raises(ConfigError, match=r"train\.dense\.lr: 0.5 here, 0.001 there"):
        train(tiny("train.dense.lr=0.5"), folder, resume=True, data_root=data_root)
    assert not list((folder / CHECKPOINTS).glob("damaged-*"))
