"""Several passes: what the tables do behind the first, and the pull on rows."""

import shutil

import pytest
import torch
from torch import nn

from gem.train import step as step_module
from gem.train.later_passes import pull_rows
from gem.train.loop import train
from gem.train.run_folder import CHECKPOINTS
from gem_opkit.errors import ConfigError, UnsupportedError

STEPS = 10  # of a pass
TWICE = ("train.passes=2", "train.checkpoint_every_steps=10")


@pytest.fixture
def watched(monkeypatch):
    """Weights, before every step and behind it; each step's batch and AdaGrad's sums before it."""
    seen: list[dict] = []
    plain = step_module.TrainStep.__call__

    def copies(step):
        tables = [p.detach().clone() for p in step.table_parameters]
        dense = [p.detach().clone() for p in step.dense.values()]
        return tables, dense

    def call(step, batch, number):
        before = copies(step)
        state = step.optimizers["tables"].state
        sums = [float(s["sum"].abs().sum()) for s in state.values()]
        scored = plain(step, batch, number)
        seen.append({"before": before, "after": copies(step), "sums": sums})
        return scored

    monkeypatch.setattr(step_module.TrainStep, "__call__", call)
    return seen


def moved(before, after):
    return [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]


def test_frozen_tables_rest_behind_the_first_pass(tiny, watched, data_root, tmp_path):
    config = tiny(*TWICE, "train.later_passes=freeze_tables")
    train(config, tmp_path, data_root=data_root)
    assert len(watched) == 2 * STEPS
    tables, dense = (
        [any(moved(s["before"][part], s["after"][part])) for s in watched] for part in (0, 1)
    )
    assert all(dense)
    # In the very first step the heads are 0 and give the tables no gradient.
    assert tables == [False] + [True] * (STEPS - 1) + [False] * STEPS


def test_reset_tables_begin_anew_and_a_resumed_run_draws_the_same(
    tiny, watched, data_root, tmp_path
):
    config = tiny(*TWICE, "train.later_passes=reset_tables")
    whole = train(config, tmp_path / "whole", data_root=data_root)
    last, first = watched[STEPS - 1]["after"], watched[STEPS]["before"]
    assert all(moved(last[0], first[0])) and not any(moved(last[1], first[1]))
    assert all(watched[STEPS - 1]["sums"]) and not any(watched[STEPS]["sums"])
    # Drawn as fresh rows are: with the spread of the recipe, and other numbers than at the start.
    drawn = torch.cat([table.flatten() for table in first[0]])
    assert float(drawn.std()) == pytest.approx(config.model.embeddings.init_std, rel=0.1)
    assert all(moved(watched[0]["before"][0], first[0]))
    unbroken = watched[-1]["after"]
    shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    shutil.rmtree(tmp_path / "broken" / CHECKPOINTS / "step-20")
    again = train(config, tmp_path / "broken", resume=True, data_root=data_root)
    assert len(watched) == 3 * STEPS
    assert not any(moved(unbroken[0], watched[-1]["after"][0]))
    for period in ("progressive", "valid", "test"):
        assert again[period] == whole[period]


def test_a_model_without_tables_has_none_to_draw(tiny, data_root, tmp_path):
    no_ids = (
        "model.experts.count=1",
        'data.inputs=["price"]',
        "data.streams={}",
        "data.statistics=[]",
    )
    config = tiny(*TWICE, *no_ids, "train.later_passes=reset_tables")
    assert train(config, tmp_path, data_root=data_root)["steps"] == 2 * STEPS


@pytest.mark.parametrize("option", ["freeze_tables", "reset_tables"])
def test_one_pass_has_no_later_one(tiny, option):
    with pytest.raises(ConfigError, match="later_passes must come with passes of at least 2"):
        tiny(f"train.later_passes={option}")


@pytest.mark.parametrize(
    "settings", [("train.row_l2=0.1",), (*TWICE, "train.later_passes=reset_tables")]
)
def test_an_engine_s_tables_are_refused(tiny, settings, data_root, tmp_path):
    config = tiny(
        *settings,
        "parallel.table_engine=torch",
        "model.embeddings.initial_rows=by_place",
    )
    with pytest.raises(UnsupportedError, match="must be left out where an engine holds the tables"):
        train(config, tmp_path, data_root=data_root)


def test_rows_that_were_looked_up_are_pulled_once_a_step():
    weight = nn.Parameter(torch.randn(6, 3, dtype=torch.float64))
    ids = torch.tensor([4, 1, 4, 4])
    looked_up = nn.functional.embedding(ids, weight, sparse=True)
    upstream = torch.randn_like(looked_up)
    looked_up.backward(upstream)
    want = torch.zeros_like(weight)
    for row, gradient in zip(ids.tolist(), upstream, strict=True):
        want[row] += gradient
    for row in {1, 4}:
        want[row] += 0.25 * weight.detach()[row]
    idle = nn.Parameter(torch.randn(2, 3))
    pull_rows([weight, idle], 0.25)
    torch.testing.assert_close(weight.grad.to_dense(), want)
    assert idle.grad is None


def test_the_pull_makes_rows_shorter_and_tables_go_on_by_default(
    tiny, data_root, tmp_path, watched
):
    # One run shows both: two passes with a pull that leaves no row long.
    train(tiny(*TWICE, "train.row_l2=10.0"), tmp_path, data_root=data_root)
    sizes = [sum(float(t.square().sum()) for t in step["after"][0]) for step in watched]
    assert sizes[-1] < 0.8 * sizes[0]
    assert not any(moved(watched[STEPS - 1]["after"][0], watched[STEPS]["before"][0]))
    assert any(moved(watched[STEPS]["before"][0], watched[STEPS]["after"][0]))
