"""A table's rows in pieces: any cut of a table as a tensor that a distributed checkpoint reshards.

A DTensor's own placements cut a dim into equal parts, which is not how tables lie: one rank may
hold a whole table, a grid cuts both dims, and a replica of a fully sharded table holds a run of
elements that begins and ends within rows. So the local part is a list of rectangles with their
places in the whole, which torch's checkpoint writes and reads one by one. Of such a DTensor the
placements only say which dims are cut; arithmetic on it is not meant.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from gem_opkit.errors import ShapeError, refusal


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A rectangle of a table, or a run of its rows' states.

    Attributes:
        values: the elements; shares the memory of the table.
        offsets: place of its first element in the whole, one number for each dim.
    """

    values: Tensor
    offsets: tuple[int, ...]


def sharded_tensor(
    shape: Sequence[int], pieces: Sequence[Piece], mesh: DeviceMesh, *, like: Tensor
) -> DTensor:
    """Join the pieces that this rank holds into the DTensor of a whole.

    Args:
        shape: of the whole.
        pieces: of this rank, in the memory that a load is to overwrite; empty ones are left out.
            No two ranks may hold overlapping pieces that differ: where replicas hold equal ones,
            one of them is written.
        mesh: of all ranks, with the axes (table_shard, table_replicate) or one axis.
        like: dtype and device of a rank that holds nothing.

    Returns:
        a DTensor without gradient.

    Raises:
        ShapeError: a piece reaches beyond the whole.
    """
    kept = [piece for piece in pieces if piece.values.numel()]
    for piece in kept:
        ends = [begin + size for begin, size in zip(piece.offsets, piece.values.shape, strict=True)]
        if min(piece.offsets) < 0 or any(e > s for e, s in zip(ends, shape, strict=True)):
            raise ShapeError(
                refusal(
                    "sharded_tensor",
                    "pieces",
                    must=f"lie within {tuple(shape)}",
                    got=f"{tuple(piece.values.shape)} at {piece.offsets}",
                    fix="give places in the whole table",
                )
            )
    if not kept:
        # torch's checkpoint tells chunks apart by their first element; no other chunk begins here.
        nothing = like.detach().new_empty((0, *shape[1:]))
        kept = [Piece(nothing, (shape[0], *(0 for _ in shape[1:])))]
    local = LocalShardsWrapper(
        [piece.values.detach() for piece in kept], [piece.offsets for piece in kept]
    )
    stride = torch.empty(tuple(shape), device="meta").stride()
    placements = (Shard(0), *(Replicate() for _ in range(mesh.ndim - 1)))
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def flat_pieces(values: Tensor, begin: int, *, width: int, first: tuple[int, int]) -> list[Piece]:
    """Cut a run of elements of a row-major block into rectangles.

    A replica of a fully sharded table holds such a run. It may begin and end within a row, so it
    is up to three rectangles: the end of a row, whole rows, the beginning of a row.

    Args:
        values: the run, 1-D.
        begin: its first element, counted from the block's first one.
        width: columns of the block.
        first: row and column of the block's first element in the table.

    Returns:
        pieces in the order of their elements, which share the memory of ``values``.
    """
    pieces: list[Piece] = []
    done = 0
    while done < values.shape[0]:
        row, column = divmod(begin + done, width)
        left = values.shape[0] - done
        if column == 0 and left >= width:
            rows = left // width
            part = values[done : done + rows * width].view(rows, width)
        else:
            part = values[done : done + min(left, width - column)].view(1, -1)
        pieces.append(Piece(part, (first[0] + row, first[1] + column)))
        done += part.numel()
    return pieces


def local_pieces(tensor: Tensor) -> list[Piece]:
    """Return what this rank holds of a tensor, in its own memory.

    Args:
        tensor: made by ``sharded_tensor``, or a plain tensor, which is one piece.

    Returns:
        its pieces; for a rank that holds nothing, none.
    """
    if not isinstance(tensor, DTensor):
        return [Piece(tensor.detach(), (0,) * tensor.ndim)]
    local = tensor.to_local()
    if isinstance(local, LocalShardsWrapper):
        return [
            Piece(values, tuple(offsets))
            for values, offsets in zip(local.local_shards(), local.local_offsets(), strict=True)
            if values.numel()
        ]
    return [
        Piece(values, tuple(chunk.offsets))
        for chunk, values in zip(tensor.__create_chunk_list__(), [local], strict=True)
        if values.numel()
    ]
