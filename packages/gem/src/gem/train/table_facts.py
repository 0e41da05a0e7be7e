"""What became of the embedding tables: sizes, rows that training has moved, lengths of rows."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from gem.data.schema import BatchSchema
from gem.model.tables import event_feature
from gem_embeddings.tables import EmbeddingTables
from gem_parallel.collectives import all_reduce_sum
from gem_parallel.launch import World

# Elements of the state that tell whether a row has had a gradient, by optimizer.
_TOUCHED_BY = ("sum", "exp_avg_sq")
# Longest part of a table that is looked at in one go, in elements.
_PART = 1 << 22


def table_facts(
    model: nn.Module,
    schema: BatchSchema,
    optimizer: torch.optim.Optimizer | None,
    world: World,
) -> dict[str, Any]:
    """Describe every table of a model. Every rank has to call this.

    Args:
        model: has its tables under the name ``tables``.
        schema: of the batches; says which inputs share a table.
        optimizer: of the tables; None where there are none.
        world: the ranks, each with a copy of every table.

    Returns:
        table -> ``{rows, width, id_space, inputs, weight_bytes, optimizer_bytes, rows_trained,
        norm_trained, norm_untrained, out_of_range}``. A row counts as trained once a gradient of
        it was not zero. The norms are ``{mean, max}`` of the L2 norms of rows, null where there
        are no such rows.

    Numerics: norms in float64 from the float32 weights.
    """
    tables = cast(EmbeddingTables, model.get_submodule("tables"))
    outside = all_reduce_sum(tables.out_of_range.clone(), world).tolist()
    owners, looked_up = _inputs_by_table(schema), set(tables.feature_names)
    found: dict[str, Any] = {}
    for spec, weight_RE, count in zip(
        tables.specs, tables.table_parameters(), outside, strict=True
    ):
        state: Mapping[str, Any] = {} if optimizer is None else optimizer.state.get(weight_RE, {})
        found[spec.name] = {
            "rows": spec.num_embeddings,
            "width": spec.embedding_dim,
            "id_space": spec.id_space,
            "inputs": [name for name in owners.get(spec.name, ()) if name in looked_up],
            "weight_bytes": _bytes(weight_RE),
            "optimizer_bytes": sum(_bytes(v) for v in state.values() if isinstance(v, Tensor)),
            **_rows(weight_RE.detach(), state),
            "out_of_range": int(count),
        }
    return found


def _inputs_by_table(schema: BatchSchema) -> dict[str, list[str]]:
    owners: dict[str, list[str]] = {}
    for source in schema.ids:
        owners.setdefault(source.table, []).append(source.name)
    for stream in schema.streams:
        for source in stream.ids:
            owners.setdefault(source.table, []).append(event_feature(stream.name, source.name))
    return owners


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _rows(weight_RE: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    accumulated = next((state[key] for key in _TOUCHED_BY if key in state), None)
    trained = torch.zeros(weight_RE.shape[0], dtype=torch.bool, device=weight_RE.device)
    norms = torch.empty(weight_RE.shape[0], dtype=torch.float64, device=weight_RE.device)
    step = max(1, _PART // max(1, weight_RE.shape[1]))
    for start in range(0, weight_RE.shape[0], step):
        part = slice(start, start + step)
        norms[part] = weight_RE[part].double().square().sum(dim=1).sqrt()
        if accumulated is not None:
            moved = accumulated[part] != 0
            trained[part] = moved if moved.ndim == 1 else moved.any(dim=1)
    return {
        "rows_trained": int(trained.sum()),
        "norm_trained": _norm(norms[trained]),
        "norm_untrained": _norm(norms[~trained]),
    }


def _norm(norms: Tensor) -> dict[str, float] | None:
    if norms.numel() == 0:
        return None
    return {"mean": float(norms.mean()), "max": float(norms.max())}
