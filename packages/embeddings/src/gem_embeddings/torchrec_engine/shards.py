"""What one rank holds: fbgemm's own memory, as rectangles of our tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gem_embeddings.contract import OptimizerSpec, TableSpec
from gem_embeddings.pieces import Piece, sharded_tensor
from gem_embeddings.rules import STATE_NAMES, is_row_wise
from gem_embeddings.torchrec_engine.placing import PlacedTable

ROW_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, eq=False)
class HeldShard:
    """A shard on this rank, without rows that are there for torchrec alone.

    Attributes:
        table: index of the table.
        weight_RE: its rows; shares fbgemm's memory, as all tensors here.
        states: name of an optimizer row -> (R,) or (R, E).
        row_start: its first row.
        column_start: its first column.
    """

    table: int
    weight_RE: Tensor
    states: dict[str, Tensor]
    row_start: int
    column_start: int


def kernels_of(collections: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Find fbgemm's modules on this rank.

    Args:
        collections: sharded collections of torchrec.

    Returns:
        each module with torchrec's list of the tables in it.
    """
    return [
        (module.emb_module, module.config)
        for collection in collections
        for lookup in collection._lookups
        for module in lookup._emb_modules
    ]


def find_shards(
    kernels: Sequence[tuple[Any, Any]], tables: Sequence[PlacedTable], optimizer: OptimizerSpec
) -> tuple[HeldShard, ...]:
    """Find what this rank holds, and set rows that no id reaches to 0.

    Args:
        kernels: from ``kernels_of``.
        tables: all tables.
        optimizer: how rows learn.

    Returns:
        the shards.
    """
    index = {table.key: i for i, table in enumerate(tables)}
    names = STATE_NAMES[optimizer.kind]
    row_wise = is_row_wise(optimizer.kind)
    held: list[HeldShard] = []
    for kernel, config in kernels:
        weights = kernel.split_embedding_weights()
        states = kernel.get_optimizer_state() if names else [{}] * len(weights)
        for table, weight, state in zip(config.embedding_tables, weights, states, strict=True):
            number = index[table.name]
            row, column = table.local_metadata.shard_offsets
            weight_RE = weight.detach().view(-1, table.local_cols)
            rows = min(weight_RE.shape[0], tables[number].spec.num_embeddings - row)
            rows = max(0, rows)
            weight_RE[rows:].zero_()
            shape = (-1,) if row_wise else weight_RE.shape
            held.append(
                HeldShard(
                    table=number,
                    weight_RE=weight_RE[:rows],
                    states={name: state[name].detach().view(shape)[:rows] for name in names},
                    row_start=row,
                    column_start=column,
                )
            )
    return tuple(held)


def state_of(
    held: Sequence[HeldShard],
    specs: Sequence[TableSpec],
    optimizer: OptimizerSpec,
    mesh: DeviceMesh | None,
    device: torch.device,
) -> dict[str, Tensor]:
    """Name what a rank holds, as a checkpoint takes it.

    Args:
        held: from ``find_shards``.
        specs: all tables.
        optimizer: how rows learn.
        mesh: axes (table_shard, table_replicate); None for one rank.
        device: of the tables.

    Returns:
        name -> DTensor of the whole, or on one rank a plain tensor.
    """
    state: dict[str, Tensor] = {}

    def add(name: str, shape: tuple[int, ...], pieces: list[Piece], dtype: torch.dtype) -> None:
        if mesh is None:
            state[name] = pieces[0].values
        else:
            like = torch.empty(0, dtype=dtype, device=device)
            state[name] = sharded_tensor(shape, pieces, mesh, like=like)

    for index, spec in enumerate(specs):
        shards = [shard for shard in held if shard.table == index]
        whole = (spec.num_embeddings, spec.embedding_dim)
        pieces = [Piece(s.weight_RE, (s.row_start, s.column_start)) for s in shards]
        add(f"tables.{spec.name}.weight", whole, pieces, ROW_DTYPES[spec.row_dtype])
        for name in STATE_NAMES[optimizer.kind]:
            dims = 1 if is_row_wise(optimizer.kind) else 2
            pieces = [Piece(s.states[name], (s.row_start, s.column_start)[:dims]) for s in shards]
            add(f"tables.{spec.name}.{name}", whole[:dims], pieces, torch.float32)
    return state
