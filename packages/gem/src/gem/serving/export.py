"""`gem export`: a trained model as a folder that scores without the run and without the log.

What a score needs besides the weights goes with them: the static features of users and items, what
the ids stand for, and what the streaming statistics held at the end of training. Histories do not:
they come with each request.

`torch.export` has no part in it. A captured graph holds tensors of one kind of shape, and here the
lengths of the histories, which are kept on the host, decide tile lists, chunks and which parts run
once for all candidates; table lookups are left out of graphs altogether. So an artefact holds
weights and settings, and `gem.serving.ranker` builds the very modules that were trained.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from gem import __version__
from gem.config import RunConfig
from gem.data.dataset import SPEC_FILE, Dataset
from gem.data.prepare import default_folder
from gem.data.reader import Reader, open_reader
from gem.data.whole_folder import begin_folder, complete_folder, is_free
from gem.serving.manifest import (
    DATA_FOLDER,
    DENSE_FILE,
    MANIFEST_FILE,
    STATISTICS_FILE,
    TABLES_FILE,
    ArtefactManifest,
    file_facts,
)
from gem.serving.weights import model_with
from gem.train.checkpoint import check_continues, read_manifest
from gem.train.checkpoint_manifest import check_content
from gem.train.export_weights import checkpoint_of, checkpoint_weights
from gem.train.fingerprint import dataset_fingerprint
from gem.train.model_fingerprint import fingerprint_of
from gem.train.run import DATA_ROOT
from gem.train.run_folder import read_run_config
from gem_opkit.errors import ConfigError, refusal
from gem_parallel.launch import World

_TABLES = "tables."


def export(
    run: Path, out: Path, *, averaged: bool = True, data_root: Path = DATA_ROOT
) -> ArtefactManifest:
    """Write the newest complete checkpoint of a run as an artefact.

    Args:
        run: the run's folder, or one of its checkpoints.
        out: folder of the artefact; new or empty. It is complete or not there.
        averaged: the averages in place of the dense weights, where the run keeps them, as
            evaluation does.
        data_root: as in `gem.train.loop.train`.

    Returns:
        the manifest.

    Raises:
        ConfigError: no run there, or ``out`` is in use.
        DataError: no complete checkpoint, or the data set is missing, malformed or another one.
        OSError: the disk refuses; nothing is left of the artefact.
    """
    _check_out(out)
    checkpoint = checkpoint_of(run, command="gem export")
    saved = read_manifest(checkpoint)
    check_content(checkpoint, saved, World())
    config = read_run_config(checkpoint.parent.parent)
    folder = default_folder(config.data, data_root)
    reader = open_reader(
        folder,
        # Rows are read one after the other, by this process.
        config.data.model_copy(update={"workers": 0}),
        batch_size=config.train.batch_examples,
    )
    check_continues(saved, config, dataset_fingerprint(folder))
    tensors, are_averaged = checkpoint_weights(checkpoint, averaged=averaged)
    first_ms, trained_until_ms = _times(folder, reader)
    model = model_with(config.model, reader.schema, tensors)
    work = begin_folder(out)
    try:
        _write_tensors(work, tensors, reader.trained_statistics())
        _copy_data(folder, work / DATA_FOLDER)
        manifest = ArtefactManifest(
            gem_version=__version__,
            torch_version=torch.__version__,
            fingerprint=fingerprint_of(model),
            recipe=config.name,
            seed=config.seed,
            steps=saved["step"],
            finished=_is_finished(config, reader, saved),
            averaged=are_averaged,
            dataset=reader.dataset.name,
            dataset_fingerprint=saved["dataset"],
            first_ms=first_ms,
            trained_until_ms=trained_until_ms,
            model=config.model,
            data=_served(config),
            precision=config.precision,
            inputs=reader.schema,
            files={
                str(path.relative_to(work)): file_facts(path)
                for path in sorted(work.rglob("*"))
                if path.is_file()
            },
        )
        _write_manifest(work / MANIFEST_FILE, manifest)
        complete_folder(work, out, last=MANIFEST_FILE)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return manifest


def _check_out(out: Path) -> None:
    if not is_free(out):
        raise ConfigError(
            refusal(
                "gem export",
                "--out",
                must="be a new or an empty folder",
                got=f"{out}, which is not empty" if out.is_dir() else f"{out}, which is no folder",
                fix="choose another --out",
            )
        )


def _write_tensors(
    work: Path, tensors: Mapping[str, Tensor], statistics: Mapping[str, np.ndarray]
) -> None:
    dense = {n: t.contiguous() for n, t in tensors.items() if not n.startswith(_TABLES)}
    tables = {n: t.contiguous() for n, t in tensors.items() if n.startswith(_TABLES)}
    save_file(dense, work / DENSE_FILE)
    save_file(tables, work / TABLES_FILE)
    held = {n: torch.from_numpy(np.ascontiguousarray(a)) for n, a in statistics.items()}
    save_file(held, work / STATISTICS_FILE)


def _copy_data(folder: Path, out: Path) -> None:
    """The contract of the data set, what stands still in it, and what its ids stand for."""
    out.mkdir()
    shutil.copyfile(folder / SPEC_FILE, out / SPEC_FILE)
    for part in ("entities", "vocabularies"):
        if (folder / part).is_dir():
            shutil.copytree(folder / part, out / part, copy_function=shutil.copyfile)


def _times(folder: Path, reader: Reader) -> tuple[int, int]:
    """Time of the first example of the log, and of the last training row."""
    dataset = Dataset.open(folder)
    times = dataset.examples([dataset.spec.examples.time])[dataset.spec.examples.time].values
    train = reader.times_ms("train")
    return int(times[0]) if len(times) else 0, int(train[-1]) if len(train) else 0


def _served(config: RunConfig) -> Any:
    """What is read of a request: where the log lay is nobody's business any more."""
    gone = {"folder": None, "source": None, "index_folder": None, "workers": 0, "max_rows": None}
    cached = {
        name: read.model_copy(update={"folder": "given by each request"})
        for name, read in config.data.user_embeddings.items()
    }
    return config.data.model_copy(update=gone | {"user_embeddings": cached, "teacher": None})


def _is_finished(config: RunConfig, reader: Reader, saved: Mapping[str, Any]) -> bool:
    stopped = bool(saved.get("loop", {}).get("stopped_early", False))
    return stopped or saved["step"] >= reader.steps("train") * config.train.passes


def _write_manifest(path: Path, manifest: ArtefactManifest) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(manifest.model_dump_json(indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
