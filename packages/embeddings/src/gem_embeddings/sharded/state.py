"""What a rank holds of each table, as tensors that a checkpoint can cut anew."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gem_embeddings.contract import OptimizerSpec, TableSpec
from gem_embeddings.pieces import Piece, flat_pieces, local_pieces, sharded_tensor
from gem_embeddings.rules import STATE_NAMES
from gem_embeddings.sharded.places import OP, Shard
from gem_embeddings.sharded.replicas import ReplicaBuffer
from gem_embeddings.sharded.storage import RowStore
from gem_opkit.errors import ConfigError, refusal


def state_of(
    specs: Sequence[TableSpec],
    stores: Sequence[RowStore],
    optimizer: OptimizerSpec,
    mesh: DeviceMesh | None,
) -> dict[str, Tensor]:
    """Describe what this rank holds.

    Args:
        specs: the tables.
        stores: their rows on this rank.
        optimizer: how rows learn.
        mesh: of all ranks; None for one.

    Returns:
        name -> DTensor, or on one rank a plain view of the table.
    """
    state: dict[str, Tensor] = {}
    for table, spec in enumerate(specs):
        for name in ("weight", *STATE_NAMES[optimizer.kind]):
            pieces: list[Piece] = []
            like: Tensor | None = None
            one_a_row = False
            for store in stores:
                buffer = store.weights if name == "weight" else store.states[name]
                one_a_row = name != "weight" and store.row_wise
                # The format of the table where this rank holds some of it, or could.
                if like is None or any(shard.table == table for shard in store.shards):
                    like = buffer.filled()
                for index, shard in enumerate(store.shards):
                    if shard.table == table:
                        pieces += _pieces(store, buffer, index, shard, one_a_row=one_a_row)
            shape = (spec.num_embeddings,) if one_a_row else _shape(spec)
            state[f"tables.{spec.name}.{name}"] = _joined(shape, pieces, mesh, like)
    return state


def _shape(spec: TableSpec) -> tuple[int, ...]:
    return (spec.num_embeddings, spec.embedding_dim)


def _joined(
    shape: tuple[int, ...], pieces: list[Piece], mesh: DeviceMesh | None, like: Tensor | None
) -> Tensor:
    if like is None:
        raise ConfigError(
            refusal(OP, "specs", must="name a table", got="none", fix="give tables to save")
        )
    if mesh is None:
        return pieces[0].values
    return sharded_tensor(shape, pieces, mesh, like=like)


def _pieces(
    store: RowStore, buffer: ReplicaBuffer, index: int, shard: Shard, *, one_a_row: bool
) -> list[Piece]:
    """What this rank keeps of one shard."""
    width = 1 if one_a_row else store.width
    begin, size = store.first_rows[index] * width, shard.rows * width
    kept = buffer.filled()
    # The part of the shard that lies in the slice of this rank, counted from the slice.
    low = max(0, begin - buffer.slice_start)
    high = min(kept.shape[0], begin + size - buffer.slice_start)
    if low >= high:
        return []
    values, skipped = kept[low:high], low + buffer.slice_start - begin
    if one_a_row:
        return [Piece(values, (shard.row_start + skipped,))]
    first = (shard.row_start, shard.column_start)
    return flat_pieces(values, skipped, width=width, first=first)


@torch.no_grad()
def load_pieces(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Copy a state into the memory of another.

    Args:
        own: from ``state_of``.
        given: the same keys, cut alike; tensors that share the memory already are left alone.

    Raises:
        ConfigError: other keys, shapes or cuts. Nothing is copied then.
    """
    if own.keys() != given.keys():
        raise ConfigError(
            refusal(
                OP,
                "state",
                must=f"have the keys {', '.join(own)}",
                got=", ".join(given) or "none",
                fix="load what table_state of the same tables and optimizer gave",
            )
        )
    pairs: list[tuple[Piece, Piece]] = []
    for name, tensor in own.items():
        mine, theirs = local_pieces(tensor), local_pieces(given[name])
        cuts = [[(p.offsets, tuple(p.values.shape)) for p in pieces] for pieces in (mine, theirs)]
        if tensor.shape != given[name].shape or cuts[0] != cuts[1]:
            raise ConfigError(
                refusal(
                    OP,
                    f"state[{name!r}]",
                    must=f"be {tuple(tensor.shape)} in the pieces {cuts[0]}",
                    got=f"{tuple(given[name].shape)} in {cuts[1]}",
                    fix="load a checkpoint, which can cut tables anew",
                )
            )
        pairs += zip(mine, theirs, strict=True)
    for mine, theirs in pairs:
        if mine.values.data_ptr() != theirs.values.data_ptr():
            mine.values.copy_(theirs.values)
