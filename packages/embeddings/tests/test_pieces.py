"""Tables cut in every way, through the files and back under another cut."""

import math
import shutil

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from gem_embeddings.checkpoint_files import copied, read, read_facts, write
from gem_embeddings.checksums import CHECKSUMS, checksum, write_checksums
from gem_embeddings.pieces import Piece, flat_pieces, local_pieces, sharded_tensor
from gem_opkit.errors import DataError, ShapeError
from gem_opkit.testing import check_refuses
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks

# One row on four ranks, odd sizes, a row longer than a rank's share, and a state of rows.
SHAPES = {"one_row": (1, 5), "odd": (7, 3), "wide": (2, 17), "tall": (33, 4), "sums": (7,)}


def whole(name):
    return torch.arange(math.prod(SHAPES[name]), dtype=torch.float32).view(SHAPES[name]) + 0.5


def spans(total, parts):
    """Ceil division, so the last parts may be empty."""
    step = -(-total // parts)
    return [(min(i * step, total), min((i + 1) * step, total)) for i in range(parts)]


def boxes(cut, shape, size, rank):
    """The rectangles of a rank, as slices of every dim."""
    every = [slice(0, n) for n in shape]
    if cut == "rows" or (len(shape) == 1 and cut != "flat"):
        return [(slice(*spans(shape[0], size)[rank]), *every[1:])]
    if cut == "table":
        return [tuple(every)] if rank == len(shape) % size else []
    if cut == "columns":
        return [(every[0], slice(*spans(shape[1], size)[rank]))]
    if cut == "grid":  # rows within a pair of ranks, columns over the pairs
        pairs = max(1, size // 2)
        if rank >= 2 * pairs:
            return []
        halves = spans(shape[0], 2 if size > 1 else 1)
        return [(slice(*halves[rank % len(halves)]), slice(*spans(shape[1], pairs)[rank // 2]))]
    raise ValueError(cut)


def cut_state(cut, world, values):
    """name -> tensor with what this rank holds; ``values`` makes the memory of a box."""
    state = {}
    mesh = init_device_mesh("cpu", (world.size,)) if world.size > 1 else None
    for name, shape in SHAPES.items():
        full = values(name)
        if mesh is None:
            state[name] = full
            continue
        if cut == "flat":
            begin, end = spans(full.numel(), world.size)[world.rank]
            width = shape[1] if len(shape) == 2 else None
            run = full.view(-1)[begin:end].clone()
            pieces = (
                [Piece(run, (begin,))]
                if width is None
                else flat_pieces(run, begin, width=width, first=(0, 0))
            )
        else:
            pieces = [
                Piece(full[box].clone(), tuple(side.start for side in box))
                for box in boxes(cut, shape, world.size, world.rank)
            ]
        state[name] = sharded_tensor(shape, pieces, mesh, like=full)
    return state


def save_cut(world, cut, folder):
    write(copied(cut_state(cut, world, whole)), {"cut": cut}, folder, world)


def load_cuts(world, cuts, folder):
    for cut in cuts:
        state = cut_state(cut, world, lambda name: torch.full(SHAPES[name], -1.0))
        read(state, folder, world)
        for name, tensor in state.items():
            for piece in local_pieces(tensor):
                box = tuple(
                    slice(begin, begin + size)
                    for begin, size in zip(piece.offsets, piece.values.shape, strict=True)
                )
                assert torch.equal(piece.values, whole(name)[box]), (cut, name)


def save_all(world, cuts, folder):
    for cut in cuts:
        save_cut(world, cut, folder / cut)


CUTS = ["rows", "table", "columns", "grid", "flat"]


def test_any_cut_on_four_ranks_is_read_under_any_cut_on_any_ranks(tmp_path):
    run_ranks(save_all, 4, CUTS, tmp_path)
    assert {folder.name for folder in tmp_path.iterdir()} == set(CUTS)  # nothing half-written
    run_ranks(load_cuts, 2, ["flat", "columns"], tmp_path / "grid")
    run_ranks(load_cuts, 3, ["rows", "table", "grid"], tmp_path / "flat")
    for cut in CUTS:
        load_cuts(World(), ["rows"], tmp_path / cut)
        assert read_facts(tmp_path / cut) == {"cut": cut}


def test_a_run_of_elements_is_cut_at_the_ends_of_rows():
    table = torch.arange(20.0).view(5, 4)
    for begin in range(20):
        for end in range(begin, 21):
            pieces = flat_pieces(table.view(-1)[begin:end], begin, width=4, first=(10, 2))
            assert len(pieces) <= 3
            found = torch.cat([piece.values.reshape(-1) for piece in pieces] or [table[:0, 0]])
            assert torch.equal(found, table.view(-1)[begin:end])
            for piece in pieces:
                first = piece.values.reshape(-1)[0]
                assert table[piece.offsets[0] - 10, piece.offsets[1] - 2] == first


def write_taken(world, folder):
    write({}, {}, folder, world)
    with pytest.raises(DataError, match="must not exist; got something there"):
        write({}, {}, folder, world)


def read_refused(world, folder, message):
    state = cut_state("rows", world, lambda name: torch.full(SHAPES[name], -1.0))
    with pytest.raises(DataError, match=message):
        read(state, folder, world)
    for tensor in state.values():
        assert all((piece.values == -1).all() for piece in local_pieces(tensor))


def refused_on_every_rank(world, folder, cases):
    for name, message in cases:
        read_refused(world, folder / name, message)


def test_a_missing_or_damaged_file_is_named_and_nothing_is_half_loaded(tmp_path):
    run_ranks(save_all, 2, ["rows"], tmp_path)
    damages = ("missing", "short", "changed", "swapped", "unlisted", "forged", "torn", "bare",
               "other")  # fmt: skip
    for name in damages:
        shutil.copytree(tmp_path / "rows", tmp_path / name)
    (tmp_path / "missing" / "__1_0.distcp").unlink()
    file = tmp_path / "short" / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-200])
    file = tmp_path / "changed" / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    # Such as files of two ranks of one size that a copy has mixed up.
    one, other = (tmp_path / "swapped" / f"__{rank}_0.distcp" for rank in range(2))
    contents = one.read_bytes(), other.read_bytes()
    size = max(map(len, contents))
    for path, content in zip((one, other), contents, strict=True):
        path.write_bytes(content.ljust(size, b"\0"))
    listed = {path.name: checksum(path) for path in one.parent.iterdir()}
    del listed[CHECKSUMS]
    write_checksums(one.parent, listed)
    one.write_bytes(contents[1].ljust(size, b"\0"))
    other.write_bytes(contents[0].ljust(size, b"\0"))
    (tmp_path / "unlisted" / CHECKSUMS).unlink()
    file = tmp_path / "forged" / CHECKSUMS
    file.write_text(file.read_text().replace("bytes", "bits", 1))
    # True of every folder, and true of another one.
    write_checksums(tmp_path / "bare", {})
    write_checksums(tmp_path / "other", {**listed, "__2_0.distcp": {"bytes": 1, "crc32": 0}})
    file = tmp_path / "torn" / ".metadata"
    file.write_bytes(file.read_bytes()[::-1])
    (tmp_path / "empty").mkdir()
    restore = "; restore it, or load another checkpoint"
    cases = [
        ("missing", "must have the file __1_0.distcp, [0-9]+ bytes; got no such file" + restore),
        ("short", "must have the file __1_0.distcp, [0-9]+ bytes; got [0-9]+ bytes" + restore),
        ("changed", r"hold in __1_0.distcp what was written \(CRC-32 .*\); got other bytes"),
        ("swapped", "hold in __[01]_0.distcp what was written .*; got other bytes"),
        (
            "unlisted",
            "must have the file checksums.json; got no such file"
            + restore
            + "; one of format 1 has none",
        ),
        ("bare", "must hold in checksums.json what was written; got something else" + restore),
        ("other", "must have the file __[0-2]_0.distcp, [0-9]+ bytes; got"),
        ("forged", "must hold in checksums.json what was written; got something else" + restore),
        ("torn", "hold in .metadata what was written .*; got other bytes"),
        ("empty", "must be a whole checkpoint; got no file .metadata"),
        ("nowhere", "must be a whole checkpoint; got no such folder"),
    ]
    run_ranks(refused_on_every_rank, 2, tmp_path, cases)
    run_ranks(write_taken, 2, tmp_path / "new")
    for name, message in cases:
        read_refused(World(), tmp_path / name, message)


def test_refuses():
    mesh = None
    check_refuses(
        [
            (
                lambda: sharded_tensor(
                    (3, 2), [Piece(torch.ones(2, 2), (2, 0))], mesh, like=torch.ones(1)
                ),
                ShapeError,
                r"pieces must lie within \(3, 2\); got \(2, 2\) at \(2, 0\)",
            )
        ]
    )
