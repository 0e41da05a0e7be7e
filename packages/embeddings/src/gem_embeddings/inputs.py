"""What a lookup takes: which feature reads which table, ids, their weights, and what is refused.

Shared by every kind of table, so that all refuse the same things in the same words; ``op`` is the
name that a message begins with.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gem_embeddings.contract import LookupSpec, Pooling, TableSpec
from gem_jagged.batch import Jagged
from gem_opkit.errors import ConfigError, DataError, DtypeError, ShapeError, refusal


def refuse_specs(op: str, name: str, must: str, got: object, fix: str = "change the specs") -> None:
    """Raise a ConfigError about specs.

    Args:
        op: who refuses.
        name: what is wrong.
        must: the rule.
        got: what arrived.
        fix: what can be done.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(refusal(op, name, must=must, got=got, fix=fix))


def features_of_tables(
    op: str, tables: Sequence[TableSpec], lookups: Sequence[LookupSpec]
) -> dict[str, dict[str, Pooling]]:
    """Decide which features each table has, and hold tables and lookups against each other.

    Args:
        op: who refuses.
        tables: the tables.
        lookups: features whose pooling differs from their table's, or that no table names.

    Returns:
        table name -> feature name -> pooling, in the order given.

    Raises:
        ConfigError: names that repeat, a feature of two tables, or a table without features.
    """
    features: dict[str, dict[str, Pooling]] = {}
    owners: dict[str, str] = {}
    for spec in tables:
        if spec.name in features:
            refuse_specs(op, "tables", "have different names", f"{spec.name!r} twice")
        features[spec.name] = {}
        for name in spec.feature_names:
            if name in owners:
                refuse_specs(
                    op,
                    f"feature {name!r}",
                    "be looked up in one table",
                    f"{owners[name]!r} and {spec.name!r}",
                    "give the second lookup a feature of its own",
                )
            owners[name] = spec.name
            features[spec.name][name] = spec.pooling
    overridden: set[str] = set()
    for lookup in lookups:
        name = lookup.feature_name
        if lookup.table_name not in features:
            known = ", ".join(features) or "no table"
            refuse_specs(op, f"lookup of {name!r}", f"name one of {known}", repr(lookup.table_name))
        if name in overridden:
            refuse_specs(op, f"lookup of {name!r}", "be given once", "two lookups")
        if owners.get(name, lookup.table_name) != lookup.table_name:
            refuse_specs(
                op,
                f"feature {name!r}",
                "be looked up in one table",
                f"{owners[name]!r} and {lookup.table_name!r}",
            )
        overridden.add(name)
        owners[name] = lookup.table_name
        features[lookup.table_name][name] = lookup.pooling
    idle = [name for name, looked_up in features.items() if not looked_up]
    if idle:
        refuse_specs(op, "tables", "be looked up by a feature", f"{', '.join(idle)} without any")
    return features


def checked_ids(op: str, name: str, ids: Mapping[str, Jagged]) -> Tensor:
    """Return the ids of a feature as int64.

    Args:
        op: who refuses.
        name: of the feature.
        ids: feature -> ids.

    Returns:
        (I,) int64.

    Raises:
        DataError: the feature is missing.
        DtypeError: not a dict, not a ``Jagged``, or not int32 or int64.
        ShapeError: another number of ids than the lengths say.
    """
    if not isinstance(ids, Mapping):
        raise DtypeError(
            refusal(
                op,
                "ids",
                must="be a dict of features",
                got=type(ids).__name__,
                fix="give each feature its Jagged by name",
            )
        )
    if name not in ids:
        raise DataError(
            refusal(
                op,
                "ids",
                must=f"have the feature {name!r}",
                got=", ".join(sorted(ids)) or "no feature",
                fix="give a feature without ids a batch of lengths 0",
            )
        )
    batch = ids[name]
    if not isinstance(batch, Jagged):
        raise DtypeError(
            refusal(
                op,
                f"ids[{name!r}]",
                must="be a Jagged",
                got=type(batch).__name__,
                fix="give ids their lengths with Jagged.from_lengths",
            )
        )
    values, total = batch.values, int(batch.lengths.sum())
    if values.ndim != 1 or values.shape[0] != total:
        raise ShapeError(
            refusal(
                op,
                f"ids[{name!r}]",
                must=f"have one dim of {total} ids, the sum of its {batch.batch} lengths",
                got=f"shape {tuple(values.shape)}",
                fix="build it with Jagged.from_lengths",
            )
        )
    if values.dtype not in (torch.int32, torch.int64):
        raise DtypeError(
            refusal(
                op,
                f"ids[{name!r}]",
                must="be int32 or int64",
                got=values.dtype,
                fix="ids are whole numbers",
            )
        )
    return values.to(torch.int64)


def checked_weight(
    op: str, name: str, ids: Mapping[str, Jagged], weights: Mapping[str, Tensor]
) -> Tensor | None:
    """Return the weights of a feature's ids.

    Args:
        op: who refuses.
        name: of the feature.
        ids: feature -> ids.
        weights: feature -> weight of each id.

    Returns:
        (I,), floating point, or None where the feature has none.

    Raises:
        ShapeError: another number of weights than of ids.
        DtypeError: not a tensor, or not floating point.
    """
    weight = weights.get(name)
    if weight is None:
        return None
    if not isinstance(weight, Tensor):
        raise DtypeError(
            refusal(
                op,
                f"weights[{name!r}]",
                must="be a tensor",
                got=type(weight).__name__,
                fix="pass one weight for each id as a tensor",
            )
        )
    if weight.shape != ids[name].values.shape:
        raise ShapeError(
            refusal(
                op,
                f"weights[{name!r}]",
                must=f"have one weight for each of {ids[name].total_tokens} ids",
                got=f"shape {tuple(weight.shape)}",
                fix="weights follow the order of the ids",
            )
        )
    if not weight.dtype.is_floating_point:
        raise DtypeError(
            refusal(
                op,
                f"weights[{name!r}]",
                must="be floating point",
                got=weight.dtype,
                fix="convert them",
            )
        )
    return weight


def check_weight_names(op: str, poolings: Mapping[str, str], weights: Mapping[str, Tensor]) -> None:
    """Refuse weights that no pooled feature uses.

    Args:
        op: who refuses.
        poolings: feature -> pooling.
        weights: feature -> weight of each id.

    Raises:
        ConfigError: weights of an unpooled or unknown feature.
    """
    for name in weights:
        if poolings.get(name, "none") == "none":
            refuse_specs(
                op,
                f"weights[{name!r}]",
                "belong to a pooled feature",
                "a feature without pooling" if name in poolings else "an unknown feature",
                "pool it with sum or mean, or multiply its vectors yourself",
            )


def id_outside(op: str, spec: TableSpec, name: str, batch: Jagged) -> DataError:
    """Name the first id of a feature that lies outside its table. Waits for a GPU.

    Args:
        op: who refuses.
        spec: the table.
        name: of the feature.
        batch: its ids, one of which lies outside.

    Returns:
        the error to raise.
    """
    ids_I = batch.values
    wrong = (ids_I < 0) | (ids_I >= spec.num_embeddings)
    position = int(wrong.nonzero()[0])
    example = int(torch.searchsorted(batch.lengths.cumsum(0), position, right=True))
    return DataError(
        refusal(
            op,
            f"ids[{name!r}]",
            must=f"be in [0, {spec.num_embeddings}) for table {spec.name!r}",
            got=f"{int(ids_I[position])} at position {position} (example {example})",
            fix='mend the data, or set out_of_range to "clamp" or "zero", or id_space to "hash"',
        )
    )
