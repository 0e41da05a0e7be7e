"""FLOPs by module of models whose elements are switched: against torch's counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gem.bench.regions import region_flops
from gem.config import load_recipe
from gem.dry_run.inputs import random_batch
from gem.model.build import build_model
from gem.planning.schema import declared_schema


@pytest.mark.parametrize(
    "settings",
    [
        ("model.preset=interformer",),
        ("model.preset=transformer",),
        ("model.preset=din",),
        ("model.stream.ffn=none", "model.stream.pooling=mean"),
    ],
    ids=str,
)
def test_attention_is_told_apart_from_other_products(settings):
    config = load_recipe("synthetic-debug", settings)
    schema = declared_schema(config)
    lengths = {"clicks": [3, 0, 5, 1], "impressions": [1, 7, 0, 4]}
    batch = random_batch(schema, lengths, torch.Generator().manual_seed(5))
    found = region_flops(config, schema, batch)
    torch.manual_seed(0)
    model = build_model(config.model, schema)
    with FlopCounterMode(display=False) as counter:
        model(batch).sum().backward()
    counted = counter.get_flop_counts()["Global"]
    attention = sum(n for op, n in counted.items() if str(op).startswith("gem_attention"))
    assert sum(own.attention.total for own in found.values()) == attention
    assert sum(own.total for own in found.values()) == counter.get_total_flops()
