"""What an artefact is: the contract of the ``artefact.json`` in its folder. No torch.

``artefact.json`` is this contract, and the folder counts once it is there; ``dense.safetensors``
has the weights of the network; ``tables.safetensors`` the embedding tables, by themselves because
they are what is large; ``statistics.safetensors`` what the streaming statistics hold behind the
last training row; ``data/`` has ``dataset.toml``, entities and vocabularies, but no example and no
event.
"""

import json
import zlib
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from gem.data.features import DataSpec
from gem.data.schema import BatchSchema
from gem.model.spec import ModelSpec
from gem_opkit.contract import Contract
from gem_opkit.errors import DataError, refusal
from gem_precision.contract import PrecisionRecipe

FORMAT = 1
MANIFEST_FILE = "artefact.json"
DENSE_FILE = "dense.safetensors"
TABLES_FILE = "tables.safetensors"
STATISTICS_FILE = "statistics.safetensors"
DATA_FOLDER = "data"
_PIECE = 1 << 24


class FileFacts(Contract):
    """A file of an artefact."""

    bytes: int = Field(ge=0)
    crc32: int = Field(ge=0, lt=2**32)


class ArtefactManifest(Contract):
    """Everything about a trained model but its tensors."""

    format: Literal[1] = Field(default=1, description="version of the layout of the folder")
    gem_version: str = Field(description="of the trainer that wrote it")
    torch_version: str = Field(description="that it was written with; for information")
    fingerprint: str = Field(description="SHA-256 over all weights, as of gem.train")
    recipe: str
    seed: int
    steps: int = Field(ge=0, description="of training")
    finished: bool = Field(description="whether the run had no step to go")
    averaged: bool = Field(description="whether the dense weights are averages over steps")
    dataset: str = Field(description="name of the data set that it was trained on")
    dataset_fingerprint: str
    first_ms: int = Field(description="time of the first example of that data set")
    trained_until_ms: int = Field(description="time of the last training row")
    model: ModelSpec
    data: DataSpec
    precision: PrecisionRecipe
    inputs: BatchSchema
    files: dict[str, FileFacts] = Field(description="path within the folder -> its content")


def file_facts(path: Path) -> FileFacts:
    """Size and CRC-32 of a file.

    Args:
        path: the file.

    Raises:
        OSError: it cannot be read.
    """
    crc32 = size = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            crc32, size = zlib.crc32(piece, crc32), size + len(piece)
    return FileFacts(bytes=size, crc32=crc32)


def read_artefact(folder: Path, *, version: str) -> ArtefactManifest:
    """Read the manifest of an artefact and compare every file with it.

    Args:
        folder: of the artefact.
        version: of the trainer that wants to load it.

    Returns:
        the manifest.

    Raises:
        DataError: no artefact there, one of another format or version, or a file of it is missing
            or not what was written.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise DataError(
            refusal(
                "artefact",
                str(folder),
                must=f"hold an {MANIFEST_FILE}",
                got="a folder without one" if folder.is_dir() else "no such folder",
                fix="make one with `gem export RUN --out ARTEFACT`",
            )
        )
    manifest = _parsed(path, version)
    for name, facts in manifest.files.items():
        _check_file(folder / name, facts)
    return manifest


def _parsed(path: Path, version: str) -> ArtefactManifest:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        found, made_by = raw["format"], str(raw["gem_version"])
    except (ValueError, KeyError, TypeError, RecursionError) as fault:
        raise _damaged(path, fault) from fault
    # While the major version is 0, a new minor one may compute something else of the same weights.
    if found != FORMAT or made_by.split(".")[:2] != version.split(".")[:2]:
        raise DataError(
            refusal(
                "artefact",
                str(path),
                must=f"be of format {FORMAT} and of gem {'.'.join(version.split('.')[:2])}",
                got=f"format {found} of gem {made_by}",
                fix="export it again, or load it with the version that wrote it",
            )
        )
    try:
        return ArtefactManifest.model_validate(raw)
    except ValidationError as fault:
        raise _damaged(path, fault) from fault


def _damaged(path: Path, fault: Exception) -> DataError:
    first = str(fault).strip().splitlines()
    return DataError(
        refusal(
            "artefact",
            str(path),
            must="be what gem export wrote",
            got="; ".join(first[:3]) or type(fault).__name__,
            fix="export it again",
        )
    )


def _check_file(path: Path, written: FileFacts) -> None:
    found = file_facts(path) if path.is_file() else None
    if found != written:
        got = "no such file" if found is None else "other bytes"
        if found is not None and found.bytes != written.bytes:
            got = f"{found.bytes} bytes"
        raise DataError(
            refusal(
                "artefact",
                str(path),
                must=f"hold the {written.bytes} bytes that were written "
                f"(CRC-32 {written.crc32:08x})",
                got=got,
                fix="copy the artefact again, or export it again",
            )
        )
