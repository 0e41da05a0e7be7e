"""What became of the embedding tables: sizes, rows that training has moved, lengths of rows."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from gem.data.schema import BatchSchema
from gem.model.sharded_tables import ShardedTables
from gem.model.tables import event_feature
from gem_embeddings.contract import TableSpec
from gem_embeddings.engine import TableEngine
from gem_embeddings.pieces import Piece, local_pieces
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
        world: the ranks, each with a copy of every table or with parts of them.

    Returns:
        table -> ``{rows, width, id_space, inputs, weight_bytes, optimizer_bytes, rows_trained,
        norm_trained, norm_untrained, out_of_range}``. A row counts as trained once a gradient of
        it was not zero. The norms are ``{mean, max}`` of the L2 norms of rows, null where there
        are no such rows.

    Numerics: norms in float64 from the float32 weights.
    """
    tables = cast(EmbeddingTables | ShardedTables, model.get_submodule("tables"))
    outside = all_reduce_sum(tables.out_of_range.clone(), world).tolist()
    owners, looked_up = _inputs_by_table(schema), set(tables.feature_names)
    parts = (
        _of_engine(tables.engine)
        if isinstance(tables, ShardedTables)
        else _of_parameters(tables, optimizer)
    )
    return {
        spec.name: {
            "rows": spec.num_embeddings,
            "width": spec.embedding_dim,
            "id_space": spec.id_space,
            "inputs": [name for name in owners.get(spec.name, ()) if name in looked_up],
            **part,
            "out_of_range": int(count),
        }
        for spec, part, count in zip(tables.specs, parts, outside, strict=True)
    }


def _of_parameters(
    tables: EmbeddingTables, optimizer: torch.optim.Optimizer | None
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for weight_RE in tables.table_parameters():
        state: Mapping[str, Any] = {} if optimizer is None else optimizer.state.get(weight_RE, {})
        found.append(
            {
                "weight_bytes": _bytes(weight_RE),
                "optimizer_bytes": sum(_bytes(v) for v in state.values() if isinstance(v, Tensor)),
                **_rows(weight_RE.detach(), state),
            }
        )
    return found


def _of_engine(engine: TableEngine) -> list[dict[str, Any]]:
    state = engine.table_state()
    found: list[dict[str, Any]] = []
    for spec in engine.specs:
        mine = _counts_here(engine, spec)
        pieces = [
            local_pieces(state[name]) if mine and name in state else []
            for name in (f"tables.{spec.name}.{key}" for key in ("weight", *_TOUCHED_BY))
        ]
        found.append(
            {
                "weight_bytes": spec.weight_bytes,
                # With the count of steps that every table has.
                "optimizer_bytes": engine.optimizer.state_bytes(spec) + 8 if engine.step else 0,
                **_sharded_rows(spec, pieces[0], [*pieces[1], *pieces[2]], engine.world),
            }
        )
    return found


def _counts_here(engine: TableEngine, spec: TableSpec) -> bool:
    """Whether no rank before this one holds the same part of a table."""
    plan = engine.plan
    member, replica = plan.place_of(engine.world.rank)
    first_copy = plan.fully_sharded or replica == 0
    placement = next(p for p in plan.placements if p.table_name == spec.name)
    return first_copy and (placement.sharding != "replicated" or member == 0)


def _sharded_rows(
    spec: TableSpec, weights: list[Piece], touched: list[Piece], world: World
) -> dict[str, Any]:
    """As `_rows`, of a table whose parts lie on many ranks. Collective."""
    count = {True: 0, False: 0}
    total, longest = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
    for start in range(0, spec.num_embeddings, _PART):
        rows = min(_PART, spec.num_embeddings - start)
        # Of each row of this range: the sum of squares, and how many of its states are not 0.
        sums_2R = torch.zeros(2, rows, dtype=torch.float64, device=world.device)
        for which, pieces in enumerate((weights, touched)):
            for piece in pieces:
                low = max(start, piece.offsets[0])
                high = min(start + rows, piece.offsets[0] + piece.values.shape[0])
                if low < high:
                    part = piece.values[low - piece.offsets[0] : high - piece.offsets[0]].double()
                    part = (part != 0).double() if which else part.square()
                    sums_2R[which, low - start : high - start] += (
                        part if part.ndim == 1 else part.sum(dim=1)
                    )
        squares_R, moved_R = all_reduce_sum(sums_2R, world)
        norms_R = squares_R.sqrt()
        for trained in (True, False):
            norms = norms_R[(moved_R > 0) == trained]
            if norms.numel():
                count[trained] += norms.numel()
                total[trained] += float(norms.sum())
                longest[trained] = max(longest[trained], float(norms.max()))
    norm = {
        trained: {"mean": total[trained] / count[trained], "max": longest[trained]}
        if count[trained]
        else None
        for trained in (True, False)
    }
    return {
        "rows_trained": count[True],
        "norm_trained": norm[True],
        "norm_untrained": norm[False],
    }


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
