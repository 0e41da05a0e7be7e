"""To and from torchrec: batches as ``KeyedJaggedTensor``, tables as its configs.

For code that has one and needs the other: a loader that makes ``KeyedJaggedTensor``, a model that
was written with ``EmbeddingBagConfig``. The engine of ``gem_embeddings.torchrec_tables`` takes our
own types and needs none of this. Imports torchrec only when it makes something of torchrec's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gem_embeddings.contract import LookupSpec, Pooling, RowDtype, TableSpec
from gem_embeddings.inputs import features_of_tables
from gem_embeddings.torchrec_engine.api import torchrec_api
from gem_jagged.batch import Jagged
from gem_opkit.errors import ShapeError, UnsupportedError, refusal

_ROWS: dict[str, RowDtype] = {"FP32": "fp32", "FP16": "fp16", "BF16": "bf16"}
_POOLINGS: dict[str, Pooling] = {"SUM": "sum", "MEAN": "mean", "NONE": "none"}


def to_keyed(ids: Mapping[str, Jagged], weights: Mapping[str, Tensor] | None = None) -> Any:
    """Join features into a ``KeyedJaggedTensor``.

    Args:
        ids: feature -> ids, all with the same number of examples.
        weights: feature -> weight of each id, (I,). If any feature has weights, the others get 1:
            a ``KeyedJaggedTensor`` has weights for all ids or for none.

    Returns:
        torchrec's tensor, its keys in the order of ``ids``. With no feature, or with no examples,
        an empty one.

    Raises:
        ShapeError: numbers of examples that differ, or weights of another length than the ids.
        UnsupportedError: torchrec is not there.
    """
    weights = {} if weights is None else weights
    counts = {name: batch.batch for name, batch in ids.items()}
    if len(set(counts.values())) > 1:
        raise ShapeError(
            refusal(
                "to_keyed",
                "ids",
                must="have as many examples in every feature",
                got=", ".join(f"{name}: {count}" for name, count in counts.items()),
                fix="convert features of different batches one by one",
            )
        )
    for name, weight in weights.items():
        if name not in ids or weight.shape != ids[name].values.shape:
            got = "an unknown feature" if name not in ids else f"shape {tuple(weight.shape)}"
            raise ShapeError(
                refusal(
                    "to_keyed",
                    f"weights[{name!r}]",
                    must="have one weight for each id of a feature",
                    got=got,
                    fix="weights follow the order of the ids",
                )
            )
    values = [batch.values for batch in ids.values()]
    lengths = [batch.offsets_O.diff() for batch in ids.values()]
    joined = None
    if weights:
        joined = torch.cat(
            [
                weights.get(name, torch.ones(batch.values.shape, device=batch.values.device))
                for name, batch in ids.items()
            ]
        )
    nothing = torch.zeros(0, dtype=torch.int64)
    return torchrec_api().KeyedJaggedTensor(
        keys=list(ids),
        values=torch.cat(values) if values else nothing,
        lengths=torch.cat(lengths) if lengths else nothing,
        weights=joined,
        stride=next(iter(counts.values()), 0),
    )


def from_keyed(keyed: Any) -> tuple[dict[str, Jagged], dict[str, Tensor]]:
    """Divide a ``KeyedJaggedTensor`` into features. Reads its lengths on the host.

    Args:
        keyed: torchrec's tensor, with or without weights; keys may have batches of their own.

    Returns:
        feature -> ids, and feature -> weight of each id, empty where it has no weights; views of
        its memory.

    Raises:
        ShapeError: lengths that do not divide among its keys, or do not fit its values.
    """
    strides = None
    if keyed.variable_stride_per_key():
        strides = list(keyed.stride_per_key())
    return split_keyed(
        keyed.keys(),
        keyed.values(),
        keyed.lengths(),
        weights=keyed.weights_or_none(),
        batches=strides,
    )


def split_keyed(
    keys: Sequence[str],
    values: Tensor,
    lengths: Tensor,
    *,
    weights: Tensor | None = None,
    batches: Sequence[int] | None = None,
) -> tuple[dict[str, Jagged], dict[str, Tensor]]:
    """Divide the parts of a ``KeyedJaggedTensor`` into features; needs no torchrec.

    Args:
        keys: names of the features; they differ.
        values: ids of all features, feature after feature.
        lengths: ids of each example, feature after feature; read on the host.
        weights: weight of each id; None for none.
        batches: examples of each feature; None where all have as many.

    Returns:
        feature -> ids, and feature -> weights.

    Raises:
        ShapeError: lengths that do not divide among the keys, or do not fit the values.
    """
    count = lengths.shape[0]
    if batches is None:
        if count % max(1, len(keys)) or (count and not keys):
            raise _misfit("lengths", f"divide among {len(keys)} keys", f"{count} lengths")
        batches = [count // len(keys)] * len(keys) if keys else []
    if sum(batches) != count or len(batches) != len(keys):
        must = f"be as many as the {sum(batches)} examples of {len(batches)} keys"
        raise _misfit("lengths", must, f"{count} lengths of {len(keys)} keys")
    host = lengths.detach().to("cpu", torch.int64)
    ends = key_ends(host, batches)
    total = ends[-1] if ends else 0
    if values.shape[0] != total:
        raise _misfit("values", f"be the {total} ids that the lengths say", values.shape[0])
    if weights is not None and weights.shape != values.shape:
        raise _misfit("weights", f"be the weights of {total} ids", tuple(weights.shape))
    ids: dict[str, Jagged] = {}
    found: dict[str, Tensor] = {}
    begin = 0
    for name, part, end in zip(keys, host.split(list(batches)), ends, strict=True):
        ids[name] = Jagged.from_lengths(values[begin:end], part)
        if weights is not None:
            found[name] = weights[begin:end]
        begin = end
    if len(ids) != len(keys):
        raise _misfit("keys", "differ", ", ".join(keys))
    return ids, found


def key_ends(lengths: Tensor, batches: Sequence[int]) -> list[int]:
    """Return where the ids of each key end.

    Args:
        lengths: ids of each example, key after key, any integer dtype, in host memory.
        batches: examples of each key.

    Returns:
        for each key the number of ids of it and those before it: whole numbers, so more than
        2^31 ids are right.
    """
    ends: list[int] = []
    total = 0
    for part in lengths.split(list(batches)):
        total += int(part.sum(dtype=torch.int64))
        ends.append(total)
    return ends


def _misfit(name: str, must: str, got: object) -> ShapeError:
    return ShapeError(
        refusal("split_keyed", name, must=must, got=got, fix="give the parts of one batch")
    )


def to_torchrec_configs(
    specs: Sequence[TableSpec], lookups: Sequence[LookupSpec] = ()
) -> tuple[list[Any], list[Any]]:
    """Describe tables to torchrec.

    Args:
        specs: the tables.
        lookups: features whose pooling differs from their table's.

    Returns:
        configs for an ``EmbeddingBagCollection`` and for an ``EmbeddingCollection``.

    Raises:
        UnsupportedError: a table whose features are pooled differently, which no collection of
            torchrec holds; or one that hashes its ids or keeps those out of range, which torchrec
            leaves to whoever makes the batch.
        ConfigError: specs and lookups that contradict each other.
    """
    api = torchrec_api()
    features = features_of_tables("to_torchrec_configs", specs, lookups)
    bags: list[Any] = []
    vectors: list[Any] = []
    for spec in specs:
        poolings = sorted(set(features[spec.name].values()))
        if len(poolings) > 1:
            raise _no_config(spec, "pool its features in one way", " and ".join(poolings))
        if spec.id_space == "hash":
            raise _no_config(spec, "have ids that are rows", 'id_space="hash"')
        if spec.out_of_range != "error":
            raise _no_config(spec, "have ids in range", f'out_of_range="{spec.out_of_range}"')
        given: dict[str, Any] = {
            "name": spec.name,
            "num_embeddings": spec.num_embeddings,
            "embedding_dim": spec.embedding_dim,
            "feature_names": list(features[spec.name]),
            "data_type": getattr(api.DataType, spec.row_dtype.upper()),
        }
        if poolings == ["none"]:
            vectors.append(api.EmbeddingConfig(**given))
        else:
            kind = getattr(api.PoolingType, poolings[0].upper())
            bags.append(api.EmbeddingBagConfig(**given, pooling=kind))
    return bags, vectors


def from_torchrec_configs(configs: Sequence[Any]) -> list[TableSpec]:
    """Read the tables of torchrec's collections.

    Args:
        configs: ``EmbeddingBagConfig`` or ``EmbeddingConfig``, of one or several collections.

    Returns:
        the tables. Initial weights become ours: within ±sqrt(1 / rows), which is torchrec's
        default.

    Raises:
        UnsupportedError: a number format that our tables do not have, or bounds of initial weights
            that are not the default.
    """
    specs = []
    for config in configs:
        dtype = str(getattr(config.data_type, "value", config.data_type)).upper()
        if dtype not in _ROWS:
            raise _no_spec(config, "data_type", f"be one of {', '.join(_ROWS)}", dtype)
        for name, sign in (("weight_init_min", -1), ("weight_init_max", 1)):
            bound = getattr(config, name)
            if bound is not None and bound != sign * config.num_embeddings**-0.5:
                raise _no_spec(config, name, "be left out", bound)
        pooling = getattr(config, "pooling", None)
        specs.append(
            TableSpec(
                name=config.name,
                embedding_dim=config.embedding_dim,
                num_embeddings=config.num_embeddings,
                feature_names=tuple(config.feature_names),
                pooling="none" if pooling is None else _POOLINGS[pooling.value],
                row_dtype=_ROWS[dtype],
            )
        )
    return specs


def _no_config(spec: TableSpec, must: str, got: str) -> UnsupportedError:
    return UnsupportedError(
        refusal(
            "to_torchrec_configs",
            f"table {spec.name!r}",
            must=must,
            got=got,
            fix="use TorchrecTables, which prepares ids and pools outside of torchrec",
        )
    )


def _no_spec(config: Any, name: str, must: str, got: object) -> UnsupportedError:
    return UnsupportedError(
        refusal(
            "from_torchrec_configs",
            f"{name} of table {config.name!r}",
            must=must,
            got=got,
            fix="make a TableSpec by hand",
        )
    )
