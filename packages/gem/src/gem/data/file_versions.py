"""Whether the files of a data set are still those that a reading began with.

Rows are found by their number, and several processes open the files at different times: with a
file written anew in between, rows of two data sets would be mixed without a word.
"""

from pathlib import Path

from gem.data.columns import not_whole, part_files
from gem.data.dataset import SPEC_FILE, Dataset
from gem_opkit.errors import DataError, refusal

FileVersion = tuple[int, int]
DataSetVersion = tuple[tuple[str, FileVersion], ...]


def file_version(file: Path) -> FileVersion:
    """What changes when a file is written anew: its size and its time of change.

    Args:
        file: of a data set.

    Raises:
        DataError: there is none.
    """
    try:
        status = file.stat()
    except OSError as fault:
        raise not_whole(file, fault) from fault
    return status.st_size, status.st_mtime_ns


def data_set_version(dataset: Dataset) -> DataSetVersion:
    """The versions of all files of a data set.

    Args:
        dataset: the data set.

    Raises:
        DataError: a part has no files.
    """
    folder = dataset.folder
    parts = [dataset.examples_folder]
    parts += [folder / "events" / stream.name for stream in dataset.spec.streams]
    parts += [folder / "entities" / entity.name for entity in dataset.spec.entities]
    files = [folder / SPEC_FILE, *(file for part in parts for file in part_files(part))]
    return tuple((file.relative_to(folder).as_posix(), file_version(file)) for file in files)


def changed(path: Path) -> DataError:
    """The error for a data set that is written while it is read.

    Args:
        path: the file, or a folder of such.
    """
    return DataError(
        refusal(
            "gem data",
            str(path),
            must="stay as it is while it is read",
            got="another content",
            fix="put the old one back and continue with --resume, or start a new run",
        )
    )
