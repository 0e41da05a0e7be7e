"""Tables of a run that begin as those of another one: rows that a larger model has learned.

Done once, before the first step; from then on the rows are the run's own. A run that goes on has
them in its checkpoint.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gem.data.dataset import Dataset
from gem.data.id_meaning import difference
from gem.data.names import nearest
from gem.data.prepare import default_folder
from gem.train.checkpoint import latest_complete, single_process_is_meant
from gem.train.checkpoint_faults import damage_named
from gem.train.checkpoint_manifest import check_content, read_manifest
from gem.train.fingerprint import dataset_fingerprint
from gem.train.run import DATA_ROOT, Run
from gem.train.run_folder import CHECKPOINTS, read_run_config
from gem_embeddings.tables import EmbeddingTables
from gem_opkit.errors import ConfigError, DataError, UnsupportedError, refusal
from gem_parallel.launch import World


def start_tables(run: Run, data_root: Path = DATA_ROOT) -> None:
    """Give tables of a run the rows of another run's, as its recipe says.

    Args:
        run: built, before its first step; one whose recipe names no other run stays as it is.
        data_root: as in `gem.train.loop.train`.

    Raises:
        ConfigError: a table that the model does not have.
        DataError: the other run has no complete checkpoint, a table of it has another shape, or
            its ids mean something else there, or nothing tells what.
        UnsupportedError: an engine holds the tables.
    """
    start = run.spec.start_tables
    if start is None:
        return
    if run.step.engine is not None:
        raise UnsupportedError(
            refusal(
                "gem train",
                "train.start_tables",
                must="be left out where an engine holds the tables",
                got="an engine",
                fix='set parallel.table_engine = "local", or begin with fresh rows',
            )
        )
    folder = Path(start.run)
    checkpoint = latest_complete(folder / CHECKPOINTS) if folder.is_dir() else None
    if checkpoint is None:
        raise DataError(
            refusal(
                "gem train",
                "train.start_tables.run",
                must="be a run with a complete checkpoint",
                got=folder,
                fix="train it first",
            )
        )
    check_content(checkpoint, read_manifest(checkpoint), World())
    own = _own(run)
    for name in start.tables or ():
        if name not in own:
            raise ConfigError(
                refusal(
                    "gem train",
                    "train.start_tables.tables",
                    must=f"name tables of the model ({', '.join(own)})",
                    got=repr(name) + nearest(name, own),
                    fix="correct the name",
                )
            )
    wanted = own if start.tables is None else {name: own[name] for name in start.tables}
    rows = _read(checkpoint, {name: place for name, (place, _) in wanted.items()})
    missing = [name for name in start.tables or () if name not in rows]
    if missing:
        raise DataError(
            refusal(
                "gem train",
                "train.start_tables.tables",
                must=f"be in {checkpoint} as well",
                got=missing[0],
                fix="leave it out",
            )
        )
    growing = _check_ids(run, folder, rows, data_root)
    with torch.no_grad():
        for name, found in rows.items():
            target = wanted[name][1]
            if name in growing:  # ids that only this run's data has come behind, and begin anew
                target = target[: len(found)]
            _check(name, target, found, checkpoint)
            target.copy_(found)
    told = ", ".join(rows) or "none, as it has no table of these names"
    run.display.stage(f"tables that begin as those of {checkpoint}: {told}")
    if rows:
        run.display.stage(
            "warning: progressive metrics are too good wherever that run has learned from the same "
            "rows; those of later periods are not"
        )


def _check_ids(run: Run, other: Path, names: Iterable[str], data_root: Path) -> set[str]:
    """Refuse rows of ids that mean something else in the data that the other run read.

    Returns:
        the tables whose first rows may be the other run's, as ids are rows there.
    """
    own = Dataset.open(default_folder(run.config.data, data_root))
    config = read_run_config(other)
    there = default_folder(config.data, data_root)
    declared = {table.name for table in own.spec.tables}
    wanted = [name for name in names if name in declared]  # others are as the recipes have them
    growing = {t.name for t in own.spec.tables if t.name in wanted and t.id_space == "row"}
    if not wanted:
        return growing
    theirs = Dataset.open(there)
    if dataset_fingerprint(there) == run.dataset:
        return growing
    known = {table.name for table in theirs.spec.tables}
    for name in wanted:
        differs = "no such table in its data" if name not in known else None
        if differs is None:
            differs = difference(name, own, theirs)
        if differs is not None:
            raise DataError(
                refusal(
                    "gem train",
                    f"table {name}",
                    must=f"have ids that mean the same in the data of {other}",
                    got=differs,
                    fix="make one data set with --grown-from the other, or leave the table out of "
                    "train.start_tables.tables",
                )
            )
    return growing


def _own(run: Run) -> dict[str, tuple[str, Tensor]]:
    """Tables of the run: name -> place in a checkpoint, and rows."""
    tables = cast(EmbeddingTables, run.step.lookups)
    names = {id(p): name for name, p in tables.named_parameters()}
    return {
        spec.name: (f"model/tables.{names[id(rows)]}", rows)
        for spec, rows in zip(tables.specs, tables.table_parameters(), strict=True)
    }


def _read(checkpoint: Path, places: Mapping[str, str]) -> dict[str, Tensor]:
    """Rows of those tables that a checkpoint has, by the name of the table."""
    with damage_named(checkpoint):
        stored = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    rows = {
        place: torch.empty(entry.size, dtype=entry.properties.dtype)
        for place in places.values()
        if isinstance(entry := stored.get(place), TensorStorageMetadata)
    }
    with single_process_is_meant(), damage_named(checkpoint):
        dcp.load(rows, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
    return {name: rows[place] for name, place in places.items() if place in rows}


def _check(name: str, own: Tensor, found: Tensor, checkpoint: Path) -> None:
    if own.shape != found.shape:
        raise DataError(
            refusal(
                "gem train",
                f"table {name}",
                must=f"have {list(own.shape)} numbers, as in the run that begins",
                got=f"{list(found.shape)} in {checkpoint}",
                fix="set model.embeddings.embedding_dim alike, or name other tables in "
                "train.start_tables.tables",
            )
        )
