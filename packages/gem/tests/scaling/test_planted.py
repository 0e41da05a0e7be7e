"""Examples that are drawn where they are trained on."""

import pytest
import torch

from gem.config import load_recipe
from gem.model.flops import batch_flops
from gem.scaling import rung
from gem.scaling.planted import PlantedWorld
from gem.scaling.read import shipped_ladders
from gem.scaling.rung import RungJob, flops_of_lengths, planted_flops, planted_schema
from gem.scaling.spec import PlantedSpec
from gem_opkit.errors import ConfigError, UnsupportedError
from gem_parallel.launch import World

BASE = str(shipped_ladders()["planted"].parent / "planted-base.toml")
WORLD = PlantedSpec(items=500, latents=4, max_events=40, signal=1.5)
CONTENT = 'data.streams.impressions.fields=["item_id","feedback","content_00","content_01"]'


def recipe(*settings):
    return load_recipe(BASE, ["train.batch_examples=32", *settings])


def world(*settings, spec=WORLD):
    schema = planted_schema(recipe(*settings))
    return PlantedWorld(spec, schema, torch.device("cpu")), schema


def test_a_batch_is_the_same_whenever_it_is_drawn():
    one, other = (world()[0].batch(7, 64) for _ in range(2))
    assert torch.equal(one.rates_B, other.rates_B)
    stream, same = one.batch.streams["impressions"], other.batch.streams["impressions"]
    assert torch.equal(stream.ids["feedback"].values, same.ids["feedback"].values)
    assert not torch.equal(one.rates_B, world()[0].batch(8, 64).rates_B)


def test_how_much_a_model_may_read_changes_no_label():
    long, _ = world("data.streams.impressions.max_events=40")
    short, _ = world("data.streams.impressions.max_events=5", CONTENT)
    one, other = long.batch(3, 256), short.batch(3, 256)
    assert torch.equal(one.batch.labels_BA, other.batch.labels_BA)
    assert torch.equal(one.rates_B, other.rates_B)
    lengths = one.batch.streams["impressions"].numbers.lengths
    assert torch.equal(lengths.clamp_max(5), other.batch.streams["impressions"].numbers.lengths)
    assert lengths.max() > 5


def test_labels_follow_the_rates_and_rates_the_rate_asked_for():
    drawn, _ = world()
    found = drawn.batch(0, 40_000)
    rates, labels = found.rates_B.double(), found.batch.labels_BA[:, 0].double()
    assert rates.mean().item() == pytest.approx(WORLD.click_rate, abs=0.02)
    spread = (rates * (1 - rates)).sum().sqrt().item()
    assert abs((labels - rates).sum().item()) < 4 * spread
    # Where the rate is high, clicks are: the labels are not drawn from the mean.
    assert labels[rates > 0.6].mean() > 0.6
    assert labels[rates < 0.1].mean() < 0.1


def test_a_history_tells_what_its_user_likes():
    """A taste that is estimated from clicks agrees with the candidate's rate, more with more."""
    drawn, _ = world(spec=WORLD.model_copy(update={"signal": 3.0}))
    found = drawn.batch(0, 4_000)
    stream = found.batch.streams["impressions"]
    clicked = (stream.ids["feedback"].values == 2).float() - WORLD.click_rate
    traits = drawn._traits_IK[stream.ids["item_id"].values - 1]
    lengths = stream.numbers.lengths
    who = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    taste = torch.zeros(len(lengths), 4).index_add_(0, who, clicked[:, None] * traits)
    candidate = drawn._traits_IK[found.batch.ids["item_id"].values - 1]
    said = (taste * candidate).sum(1) / lengths
    agreement = [
        torch.corrcoef(torch.stack([said[part], found.rates_B[part].logit()]))[0, 1].item()
        for part in (lengths <= 5, lengths >= 30)
    ]
    assert agreement[0] > 0.1
    assert agreement[1] > agreement[0] + 0.2


def test_content_is_the_traits_with_noise():
    drawn, _ = world(CONTENT)
    stream = drawn.batch(0, 4_000).batch.streams["impressions"]
    traits = drawn._traits_IK[stream.ids["item_id"].values - 1]
    content = stream.numbers.values
    assert content.shape == (len(traits), 2)
    noise = content - traits[:, :2]
    assert noise.std().item() == pytest.approx(WORLD.content_noise, rel=0.15)
    assert torch.corrcoef(torch.stack([content[:, 0], traits[:, 0]]))[0, 1] > 0.8


def test_flops_are_known_before_a_rung_is_run_to_the_last_one():
    config = recipe('model.layers=["transformer","interaction"]', CONTENT)
    schema = planted_schema(config)
    drawn = PlantedWorld(WORLD, schema, torch.device("cpu"))
    batches = [drawn.batch(number, 32).batch for number in range(3)]
    wanted = sum(batch_flops(config.model, schema, batch).total for batch in batches)
    lengths = torch.cat([batch.streams["impressions"].numbers.lengths for batch in batches])
    counts = {int(n): int((lengths == n).sum()) for n in lengths.unique()}
    assert flops_of_lengths(config, schema, counts, batches=3) == wanted
    settings = ("train.batch_examples=32", 'model.layers=["transformer","interaction"]', CONTENT)
    job = RungJob("a", "b", BASE, settings, 0, 1, WORLD, 3 * 32, 32, "cpu", None)
    assert planted_flops(job) == wanted / 96


def test_a_world_is_drawn_for_one_rank():
    with pytest.raises(UnsupportedError, match="must be trained by one process; got 2 ranks"):
        rung._refuse_ranks(World(rank=1, size=2))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (['data.inputs=["item_id","price"]'], "price"),
        (['data.streams.impressions.fields=["item_id","content_01"]'], "content_01 in this order"),
        (['data.streams.impressions.fields=["item_id","category"]'], "category"),
    ],
)
def test_an_input_that_the_world_does_not_have_is_refused(settings, named):
    with pytest.raises(ConfigError, match=named):
        world(*settings)
