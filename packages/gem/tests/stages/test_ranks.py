"""What models learn from one another on several ranks: the same as on one."""

from contextlib import contextmanager

import pytest

from gem.config import RunConfig
from gem.stages.embed import embed_users
from gem.train import loop, saved_run
from gem.train.loop import train
from gem.train.predict import predict
from gem_opkit.errors import UnsupportedError
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks

PLAIN = ("model.dropout=0.0", "train.ema_decay=0.5")
USER = (
    *("data.statistics=[]", "model.stream.target_tokens=0", "model.user_model.width=4"),
    # Items of the batch are those of a rank, so that this loss is another one on two.
    *("model.user_model.next_event_weight=0.0", *PLAIN),
)


def trained(world: World, config: RunConfig, folder, data_root):
    @contextmanager
    def these_ranks(_):
        yield world

    loop.process_group = these_ranks
    return train(config, folder, data_root=data_root)


def on_two(config, folder, data_root):
    return run_ranks(trained, 2, config, folder, data_root)[0]


def alike(found, expected):
    for period in ("progressive", "valid", "test"):
        for task in ("click", "conversion"):
            ne = expected[period][task]["ne"]
            assert found[period][task]["ne"] == pytest.approx(ne, rel=2e-5)


def test_a_student_learns_the_same_on_two_ranks(tiny, tmp_path, data_root):
    train(tiny(*PLAIN), tmp_path / "teacher", data_root=data_root)
    said = tmp_path / "p"
    predict(tmp_path / "teacher", said, splits=("train",), progressive=True, data_root=data_root)
    config = tiny(f'data.teacher.folder="{said}"', "model.distillation={}", *PLAIN, seed=2)
    one = train(config, tmp_path / "one", data_root=data_root)
    alike(on_two(config, tmp_path / "two", data_root), one)


def test_a_model_of_users_learns_the_same_on_two_ranks(tiny, tmp_path, data_root):
    one = train(tiny(*USER), tmp_path / "one", data_root=data_root)
    alike(on_two(tiny(*USER), tmp_path / "two", data_root), one)


def refused(world: World, folder, out, data_root):
    @contextmanager
    def these_ranks(_):
        yield world

    saved_run.process_group = these_ranks
    with pytest.raises(UnsupportedError, match=r"must (run in|be) one process"):
        embed_users(folder, out, data_root=data_root)
    with pytest.raises(UnsupportedError, match=r"must (run in|be) one process"):
        predict(folder, out, splits=("train",), progressive=True, data_root=data_root)
    return out.exists()


def test_embeddings_and_progressive_predictions_want_one_process(tiny, tmp_path, data_root):
    train(tiny(*USER), tmp_path / "run", data_root=data_root)
    assert run_ranks(refused, 2, tmp_path / "run", tmp_path / "out", data_root) == [False] * 2
