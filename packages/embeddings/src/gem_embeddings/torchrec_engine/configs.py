"""Our tables as torchrec's collections, plan and sharders.

torchrec looks pooled features up in an ``EmbeddingBagCollection`` and unpooled ones in an
``EmbeddingCollection``, and no table can be in both. A table that has both kinds of features lies
in the second; its pooled features are pooled from its vectors, which is exact.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec

from gem_embeddings.contract import OptimizerSpec, RowDtype
from gem_embeddings.torchrec_engine.api import torchrec_api
from gem_embeddings.torchrec_engine.placing import OPTIMIZERS, PlacedTable, refuse

_KINDS = {
    "table_wise": "table_wise",
    "row_wise": "row_wise",
    "column_wise": "column_wise",
    "table_row_wise": "table_row_wise",
    "grid": "grid_shard",
}


@dataclass(frozen=True, slots=True)
class Collection:
    """Tables that one collection of torchrec holds.

    Attributes:
        name: of the collection.
        pooled: an ``EmbeddingBagCollection``; otherwise an ``EmbeddingCollection``.
        tables: indices of its tables.
        features: its features in the order in which their ids are sent.
    """

    name: str
    pooled: bool
    tables: tuple[int, ...]
    features: tuple[str, ...]

    @property
    def keys(self) -> dict[str, str]:
        """Name of each feature in torchrec -> ours, in which an @ would mean something there."""
        return {f"feature_{index}": name for index, name in enumerate(self.features)}


def collect_tables(
    tables: Sequence[PlacedTable], features: Mapping[str, Mapping[str, str]]
) -> tuple[Collection, ...]:
    """Divide tables among collections.

    Args:
        tables: the tables.
        features: table name -> feature name -> pooling.

    Returns:
        collections. Unpooled ones hold tables of one width, cut into columns of one width: torchrec
        asks for both.

    Raises:
        UnsupportedError: a table with unpooled features under a sharding that torchrec has for
            pooled ones alone.
    """
    groups: dict[tuple[bool, int, int], list[int]] = {}
    for index, table in enumerate(tables):
        key = (True, 0, 0)
        if "none" in features[table.spec.name].values():
            widths = sorted({shard.columns for shard in table.shards})
            if table.sharding in ("table_row_wise", "grid"):
                refuse("features", "all be pooled", "a feature without pooling", table=table)
            if len(widths) > 1:
                refuse("columns", "be cut into equal parts", widths, table=table)
            key = (False, table.spec.embedding_dim, widths[0])
        groups.setdefault(key, []).append(index)
    collections: list[Collection] = []
    for (pooled, width, cut), indices in groups.items():
        names = [name for i in indices for name in features[tables[i].spec.name]]
        name = "bags" if pooled else f"vectors_{width}_{cut}"
        collections.append(Collection(name, pooled, tuple(indices), tuple(names)))
    return tuple(collections)


def make_module(
    collection: Collection,
    tables: Sequence[PlacedTable],
    features: Mapping[str, Mapping[str, str]],
) -> Any:
    """Make the unsharded collection, without memory.

    Args:
        collection: which tables.
        tables: all tables.
        features: table name -> feature name -> pooling.

    Returns:
        torchrec's module on the meta device. Pooled features are declared as sums; a mean is
        divided afterwards, so that one table can have both.
    """
    api = torchrec_api()
    rows: dict[str, Any] = {"fp32": api.DataType.FP32, "fp16": api.DataType.FP16}
    configs = []
    for index in collection.tables:
        table = tables[index]
        given: dict[str, Any] = {
            "name": table.key,
            "num_embeddings": table.rows,
            "embedding_dim": table.spec.embedding_dim,
            "feature_names": [
                key for key, name in collection.keys.items() if name in features[table.spec.name]
            ],
            "data_type": rows[table.spec.row_dtype],
        }
        if collection.pooled:
            configs.append(api.EmbeddingBagConfig(**given, pooling=api.PoolingType.SUM))
        else:
            configs.append(api.EmbeddingConfig(**given))
    kind = api.EmbeddingBagCollection if collection.pooled else api.EmbeddingCollection
    return kind(tables=configs, device=torch.device("meta"))


def make_plan(collections: Sequence[Collection], tables: Sequence[PlacedTable], device: str) -> Any:
    """Write torchrec's plan by hand.

    Args:
        collections: which tables lie in which.
        tables: all tables.
        device: ``cpu`` or ``cuda``.

    Returns:
        a ``ShardingPlan`` that names ranks of a sharding group, and the fused kernel: without it
        torchrec takes the dense one and ignores the optimizer.
    """
    api = torchrec_api()

    def sharding(table: PlacedTable) -> Any:
        shards = [
            ShardMetadata(
                shard_offsets=[s.row_start, s.column_start],
                shard_sizes=[s.rows, s.columns],
                placement=f"rank:{s.rank}/cpu" if device == "cpu" else f"rank:{s.rank}/cuda:0",
            )
            for s in table.shards
        ]
        return api.ParameterSharding(
            sharding_type=_KINDS[table.sharding],
            compute_kernel="fused",
            ranks=[shard.rank for shard in table.shards],
            sharding_spec=EnumerableShardingSpec(shards),
        )

    return api.ShardingPlan(
        plan={
            collection.name: api.EmbeddingModuleShardingPlan(
                {tables[i].key: sharding(tables[i]) for i in collection.tables}
            )
            for collection in collections
        }
    )


def fused_params(optimizer: OptimizerSpec) -> dict[str, Any]:
    """Describe an optimizer to fbgemm.

    Args:
        optimizer: how rows learn.

    Returns:
        the parameters. A moment scale c goes in as a factor: lr / (sqrt(s / c) + eps) is
        (lr · sqrt(c)) / (sqrt(s) + eps · sqrt(c)).
    """
    api = torchrec_api()
    return {
        "optimizer": getattr(api.EmbOptimType, OPTIMIZERS[optimizer.kind]),
        "learning_rate": optimizer.lr * moment_factor(optimizer),
        "eps": optimizer.eps * moment_factor(optimizer),
        "output_dtype": api.DataType.FP32,
    }


def moment_factor(optimizer: OptimizerSpec) -> float:
    """Return what fbgemm's learning rate and eps are multiplied by for a moment scale.

    Args:
        optimizer: how rows learn.
    """
    return float(optimizer.moment_scale) ** 0.5


def make_sharders(optimizer: OptimizerSpec, wire_dtype: RowDtype, device: str) -> list[Any]:
    """Make what shards the two kinds of collections.

    Args:
        optimizer: how rows learn.
        wire_dtype: format of vectors between ranks.
        device: ``cpu`` or ``cuda``.

    Returns:
        two sharders. On CUDA that of unpooled features sends each id to a rank once.
    """
    api = torchrec_api()
    codecs = None
    if wire_dtype != "fp32":
        kind = api.CommType.FP16 if wire_dtype == "fp16" else api.CommType.BF16
        config = api.QCommsConfig(forward_precision=kind, backward_precision=kind)
        codecs = api.get_qcomm_codecs_registry(config, device=torch.device(device))
    given: dict[str, Any] = {
        "fused_params": fused_params(optimizer),
        "qcomm_codecs_registry": codecs,
    }
    return [
        api.EmbeddingBagCollectionSharder(**given),
        # fbgemm finds different ids on CUDA alone.
        api.EmbeddingCollectionSharder(**given, use_index_dedup=device == "cuda"),
    ]
