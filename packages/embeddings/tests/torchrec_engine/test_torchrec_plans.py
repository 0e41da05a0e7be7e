"""Plans that are made for the torchrec engine are plans that it takes. Needs no torchrec."""

import itertools
from typing import get_args

import pytest

from gem_embeddings.contract import OptimizerSpec, Pooling, TableSpec
from gem_embeddings.inputs import features_of_tables
from gem_embeddings.plan import plan_tables
from gem_embeddings.planning.spec import PlanningSpec
from gem_embeddings.torchrec_engine.configs import collect_tables
from gem_embeddings.torchrec_engine.placing import place_tables, replicated_tables
from gem_opkit.errors import ConfigError

SUM, MEAN, NONE = get_args(Pooling)
# Width, rows, pooling: some want all ranks, some one, and widths that do not divide.
TABLES = [
    TableSpec(
        name=f"t{i}", embedding_dim=d, num_embeddings=r, feature_names=(f"f{i}",), pooling=pooling
    )
    for i, (d, r, pooling) in enumerate(
        [
            (64, 10_000_000, SUM),
            (128, 3, MEAN),
            (12, 5_000_000, NONE),
            (256, 2_000_000, SUM),
            (128, 50_000_000, NONE),
            (20, 1000, SUM),
        ]
    )
]


@pytest.mark.parametrize("kind", ["rowwise_adagrad", "adagrad"])
@pytest.mark.parametrize("ranks", [4, 16])
def test_a_plan_for_torchrec_is_taken(ranks: int, kind) -> None:
    optimizer = OptimizerSpec(kind=kind)
    taken = 0
    for group, gib in itertools.product((None, 4), (None, 8.0, 2.5)):
        planning = PlanningSpec(engine="torchrec", memory_gib=gib, table_shard=group)
        try:
            plan = plan_tables(TABLES, ranks=ranks, optimizer=optimizer, planning=planning)
        except ConfigError:  # does not fit: nothing to take
            assert gib is not None
            continue
        placed = place_tables(TABLES, plan, optimizer, device="cuda", wire_dtype="fp32")
        features = features_of_tables("test", TABLES, [])
        held = [i for part in collect_tables(placed, features) for i in part.tables]
        assert sorted(held) == list(range(len(placed)))
        assert len(placed) + len(replicated_tables(plan)) == len(TABLES)
        taken += 1
    assert taken >= 2


def test_a_plan_for_torchrec_is_never_fully_sharded() -> None:
    with pytest.raises(ValueError, match="fully_sharded must be left out or false with engine"):
        PlanningSpec(engine="torchrec", fully_sharded=True)
    # The same plan for the other engine is: without it the copies would not fit.
    specs, optimizer = [TABLES[0], TABLES[3]], OptimizerSpec(kind="adagrad")
    fits = {"table_shard": 4, "memory_gib": 1.9}
    plan = plan_tables(specs, ranks=8, optimizer=optimizer, planning=PlanningSpec(**fits))
    assert plan.fully_sharded
    planning = PlanningSpec(engine="torchrec", **fits)
    with pytest.raises(ConfigError, match="memory_gib"):
        plan_tables(specs, ranks=8, optimizer=optimizer, planning=planning)
