import resource

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem.data.record_sort import sorted_records
from gem_opkit.errors import DataError

RECORD = np.dtype([("user", "<i8"), ("part", "?"), ("seen", "<i8"), ("number", "<i8")])
KEYS = ("user", "part", "seen")


def records_of(rows):
    made = np.zeros(len(rows), RECORD)
    for place, (user, part, seen) in enumerate(rows):
        made[place] = (user, part, seen, place)
    return made


def in_pieces(records, length):
    """Pieces as the sort asks for them; where only keys are wanted, the rest is spoiled."""

    def pieces(*, keys_only):
        for start in range(0, max(len(records), 1), length):
            piece = records[start : start + length].copy()
            if keys_only:
                piece["number"] = -1
            yield piece

    return pieces


def sort(records, folder, *, budget_bytes, length=5):
    """What the sort gives, and how long its pieces are."""
    pieces = sorted_records(
        in_pieces(records, length), KEYS, most=len(records), budget_bytes=budget_bytes, work=folder
    )
    found = list(pieces)
    return np.concatenate([records[:0], *found]), [len(piece) for piece in found]


@given(
    rows=st.lists(st.tuples(st.integers(-2, 2), st.booleans(), st.integers(0, 3)), max_size=120),
    budget_bytes=st.integers(1, 4000),
    length=st.integers(1, 40),
)
@settings(max_examples=60)
def test_order_is_that_of_python_and_equal_keys_keep_theirs(
    tmp_path_factory, rows, budget_bytes, length
):
    folder = tmp_path_factory.mktemp("sort")
    found, _ = sort(records_of(rows), folder, budget_bytes=budget_bytes, length=length)
    expected = sorted(range(len(rows)), key=lambda place: rows[place])  # Python's is stable
    assert found["number"].tolist() == expected
    assert not any(folder.iterdir())


@pytest.mark.parametrize("users", [1, 40])
def test_buckets_keep_to_the_budget_even_where_one_user_has_the_log(tmp_path, users):
    random = np.random.default_rng(3)
    records = np.zeros(60_000, RECORD)
    records["user"] = random.integers(0, users, len(records))
    records["seen"] = random.integers(0, 3, len(records))  # hardly any two keys differ
    records["number"] = np.arange(len(records))
    budget_bytes = records.nbytes // 10
    found, lengths = sort(records, tmp_path, budget_bytes=budget_bytes, length=1000)
    assert len(lengths) > 20
    assert max(lengths) * RECORD.itemsize < budget_bytes
    assert np.array_equal(found, np.sort(records, order=[*KEYS, "number"]))


def test_records_in_order_are_passed_on_without_a_file(tmp_path):
    records = records_of([(user, True, seen) for user in range(9) for seen in (1, 1, 2)])
    tmp_path.chmod(0o500)
    found, lengths = sort(records, tmp_path / "nowhere", budget_bytes=1)
    assert np.array_equal(found, records)
    assert max(lengths) == 5


@pytest.mark.parametrize("room", [1000, 2000, 2500])
def test_a_disk_that_is_full_loses_no_record(tmp_path, room):
    """Also where all that does not fit is what is left in a buffer when a file is closed."""
    records = records_of([(place * 7 % 50, True, place * 3 % 50) for place in range(400)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            sort(records, tmp_path, budget_bytes=9000, length=50)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("budget_bytes", [1, 1 << 20])
def test_records_that_are_others_the_second_time_are_refused(tmp_path, budget_bytes):
    records = records_of([(9 - place % 10, True, place) for place in range(60)])

    def fewer(*, keys_only):
        yield records if keys_only else records[:59]

    with pytest.raises(DataError, match=r"as many as there are, 60; got 59"):
        list(sorted_records(fewer, KEYS, most=60, budget_bytes=budget_bytes, work=tmp_path))
