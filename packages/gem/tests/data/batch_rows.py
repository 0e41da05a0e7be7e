"""Readers of the tiny data set, their batches row by row, and damage to a file."""

from gem.data.features import DataSpec
from gem.data.reader import open_reader


def reader(folder, batch_size=4, rank=0, world_size=1, **section):
    data = DataSpec.model_validate({"dataset": "tiny", **section})
    return open_reader(folder, data, batch_size=batch_size, rank=rank, world_size=world_size)


def tensors(batch):
    """Every tensor of a batch by a name, packed ones as lists of one tensor a row."""
    found = {
        name: list(getattr(batch, name))
        for name in (
            "numbers_BD",
            "labels_BA",
            "label_mask_BA",
            "weights_B",
            "domains_B",
            "user_B",
            "row_B",
        )
    }
    found |= {f"ids.{name}": jagged.to_list() for name, jagged in batch.ids.items()}
    for name, stream in batch.streams.items():
        found |= {f"{name}.ids.{field}": j.to_list() for field, j in stream.ids.items()}
        found[f"{name}.numbers"] = stream.numbers.to_list()
        found[f"{name}.gap"] = stream.gap_seconds.to_list()
    return found


def rows_of(batches):
    """name -> rows, over consecutive batches."""
    joined = {}
    for batch in batches:
        for name, rows in tensors(batch).items():
            joined.setdefault(name, []).extend(rows)
    return joined


def assert_equal_rows(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert len(left[name]) == len(right[name]), name
        for a, b in zip(left[name], right[name], strict=True):
            assert a.dtype == b.dtype
            assert a.equal(b), name


def flip(path, place):
    """One bit of a byte."""
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)
