"""Folders of arrays: made once, by whoever comes first, whole, and checked as they are read."""

import os
import resource
import threading

import numpy as np
import pytest
from batch_rows import flip

from gem.data.array_folder import MANIFEST, made_once, map_arrays
from gem_opkit.errors import DataError


def numbers_into(values):
    def make(writer, work):
        (work / "scratch").write_text("left behind")
        for value in values:
            writer.append("numbers", np.atleast_1d(np.asarray(value, np.int64)))

    return make


def test_an_index_is_made_once_by_many_and_again_for_other_data(tmp_path):
    made, lock = [], threading.Lock()

    def make(writer, work):
        with lock:
            made.append(work)
        numbers_into(range(100))(writer, work)

    def ask():
        assert made_once(tmp_path / "root", "events", "a1", make)["numbers"].whole().sum() == 4950

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert not made[0].exists()
    kept = made_once(tmp_path / "root", "events", "a1", make)["numbers"]
    other = made_once(tmp_path / "root", "events", "b2", numbers_into([7]))["numbers"]
    assert other.whole().tolist() == [7]
    folders = [entry.name for entry in (tmp_path / "root").iterdir() if entry.is_dir()]
    assert folders == ["events-b2"]
    assert kept.whole().sum() == 4950  # whoever reads the old one goes on


def test_an_index_of_a_killed_process_does_not_count(tmp_path):
    def fails(writer, work):
        numbers_into([1, 2])(writer, work)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made_once(tmp_path, "events", "a1", fails)
    # A process that is killed on the spot cannot even clean up.
    partial = tmp_path / ".events-a1.partial"
    (partial / "work").mkdir(parents=True)
    (partial / "numbers.bin").write_bytes(bytes(80))
    other = tmp_path / ".events-b2.partial"  # whose data has changed since
    other.mkdir()
    made = made_once(tmp_path, "events", "a1", numbers_into([5]))["numbers"]
    assert made.whole().tolist() == [5]
    assert not partial.exists()
    assert not other.exists()


@pytest.mark.parametrize("damage", ["cut", "gone", "manifest", "sums", "dtype"])
def test_a_damaged_index_is_told_and_made_again(tmp_path, caplog, damage):
    made_once(tmp_path, "events", "a1", numbers_into(range(9)))
    folder = tmp_path / "events-a1"
    if damage == "cut":
        os.truncate(folder / "numbers.bin", 70)
    elif damage == "gone":
        (folder / "numbers.bin").unlink()
    elif damage == "sums":
        flip(folder / "numbers.sums", 1)
    elif damage == "dtype":  # of the same length, and read as other numbers
        text = (folder / MANIFEST).read_text()
        (folder / MANIFEST).write_text(text.replace("<i8", "<u8"))
    else:
        text = (folder / MANIFEST).read_text()
        (folder / MANIFEST).write_text(text[: len(text) // 2])
    with pytest.raises(
        DataError, match=r"must hold whole arrays.*that folder is made anew"
    ) as fault:
        map_arrays(folder)
    assert "\n" not in str(fault.value)
    assert (
        made_once(tmp_path, "events", "a1", numbers_into(range(9)))["numbers"].whole().sum() == 36
    )
    assert "must hold whole arrays" in caplog.text


def test_a_flipped_bit_is_found_where_it_is_read_and_not_before(tmp_path):
    """In each block of several, the last one a short one; the index is made anew after it."""
    values = np.arange(20_000, dtype=np.int64)  # 8,192 of them are a block
    for place in (0, 8191, 8192, 19_999):
        arrays = made_once(tmp_path, "events", "a1", numbers_into([values]))
        assert np.array_equal(arrays["numbers"][values[::-7]], values[::-7])
        folder = tmp_path / "events-a1"
        flip(folder / "numbers.bin", place * 8 + 3)
        numbers = map_arrays(folder)["numbers"]
        others = values[values // 8192 != place // 8192]
        assert np.array_equal(numbers[others], others)
        with pytest.raises(DataError, match=r"other bytes in .* of numbers.bin; .*--resume") as one:
            numbers[np.asarray([place])]
        assert "\n" not in str(one.value)
        again = made_once(tmp_path, "events", "a1", numbers_into([values]))["numbers"]
        assert np.array_equal(again.whole(), values)


def test_arrays_that_are_checked_at_once_are_made_again_at_once(tmp_path, caplog):
    made_once(tmp_path, "events", "a1", numbers_into(range(9)))
    flip(tmp_path / "events-a1/numbers.bin", 40)
    again = made_once(tmp_path, "events", "a1", numbers_into(range(9)), at_once=["numbers", "seen"])
    assert again["numbers"].whole().tolist() == list(range(9))
    assert "other bytes in 0 .. 71 of numbers.bin; it is made again now" in caplog.text


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    """The limit of a file's size stands for the disk; it strikes at the second append."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, hard))
    try:
        with pytest.raises(DataError, match=r"must take the index.*make room there") as fault:
            made_once(tmp_path / "root", "events", "a1", numbers_into([np.zeros(1000)] * 2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(fault.value)
    assert [entry.name for entry in (tmp_path / "root").iterdir()] == [".events.lock"]
    made = made_once(tmp_path / "root", "events", "a1", numbers_into([np.zeros(1000)] * 2))
    assert len(made["numbers"]) == 2000
