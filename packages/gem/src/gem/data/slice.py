"""`gem data slice`: a data set of some of the examples of another, as a vertical has it.

Events, entities and tables stay whole: a user's history is what the user did everywhere. Splits
keep their borders in time.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gem.data.columns import part_files
from gem.data.dataset import Dataset, DatasetWriter
from gem.data.features import DatasetSpec
from gem.data.names import nearest
from gem_opkit.errors import ConfigError, DataError, refusal

_COMMAND = "gem data slice"


def slice_dataset(folder: Path, out: Path, where: Mapping[str, Sequence[int]]) -> DatasetSpec:
    """Write the examples that hold certain ids, with all events and entities.

    Args:
        folder: of a data set.
        out: folder of the slice; new or empty.
        where: id column of the examples, or their domain, -> ids that are kept; with several
            columns a row has to fit all of them.

    Returns:
        the contract of the slice: that of the data set with fewer rows.

    Raises:
        ConfigError: a column that holds no single id, or no condition.
        DataError: no row fits, or a malformed data set.
    """
    dataset = Dataset.open(folder)
    spec = dataset.spec
    known = {field.name for field in spec.examples.ids if not field.multi}
    known |= {spec.examples.user} | ({spec.examples.domain} - {None})
    for column in where:
        if column not in known:
            raise _refused(
                "be an id column of the examples, one id a row",
                repr(column) + nearest(column, sorted(filter(None, known))),
            )
    if not where:
        raise _refused("name at least one column and its ids", "none")
    columns = dataset.examples(where)
    kept = np.ones(spec.examples.rows, bool)
    for column, ids in where.items():
        kept &= np.isin(columns[column].values, np.asarray(ids))
    if not kept.any():
        raise DataError(
            refusal(
                _COMMAND,
                "--where",
                must="leave at least one example",
                got=f"none of {spec.examples.rows} in {folder}",
                fix="name ids that occur",
            )
        )
    before = np.append(0, np.cumsum(kept))
    told = "; ".join(f"{name} in {', '.join(map(str, ids))}" for name, ids in where.items())
    smaller = spec.model_copy(
        update={
            "description": f"{spec.description} Examples with {told}.".strip(),
            "examples": spec.examples.model_copy(update={"rows": int(before[-1])}),
            "splits": tuple(
                split.model_copy(
                    update={"start": int(before[split.start]), "stop": int(before[split.stop])}
                )
                for split in spec.splits
            ),
        }
    )
    with DatasetWriter(out) as writer:
        first = 0
        for part in part_files(dataset.examples_folder):
            table = pq.read_table(part)
            mask = pa.array(kept[first : first + len(table)])
            first += len(table)
            writer.examples(_columns(table.filter(mask)))
        for stream in spec.streams:
            for part in dataset.event_files(stream.name):
                writer.events(stream.name, _columns(pq.read_table(part)))
        for entity in spec.entities:
            for part in part_files(folder / "entities" / entity.name):
                writer.entity(entity.name, _columns(pq.read_table(part)))
        for folder_of in sorted((folder / "vocabularies").glob("*")):
            for part in part_files(folder_of):
                writer.vocabulary(folder_of.name, _columns(pq.read_table(part)))
        writer.finish(smaller)
    return smaller


def _columns(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    return {name: table[name] for name in table.column_names}


def _refused(must: str, got: str) -> ConfigError:
    return ConfigError(
        refusal(_COMMAND, "--where", must=must, got=got, fix="give such as --where tab=1,4")
    )
