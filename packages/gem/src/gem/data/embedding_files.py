"""A folder of cached user embeddings: Parquet parts and a manifest. Written and read here.

A part holds the embeddings of one tick, `part-<ms>.parquet`, with the columns `user`,
`valid_from_ms` and `embedding`, sorted by time and user. An embedding is made of what was known
before `valid_from_ms` and may be read by examples strictly later. The manifest comes last: a part
that it does not list does not count.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, ValidationError

from gem.contract_faults import explain
from gem_opkit.contract import Contract
from gem_opkit.errors import DataError, refusal

MANIFEST = "embeddings.json"
FORMAT = 1
_FINGERPRINT, _FORMAT_KEY = b"gem_fingerprint", b"gem_format"
_COLUMNS = ("user", "valid_from_ms", "embedding")


class Part(Contract):
    """One tick."""

    file: str
    until_ms: int = Field(description="what was known before this time is in it")
    rows: int
    users: int


class Manifest(Contract):
    """What a folder of embeddings holds."""

    format: int = FORMAT
    fingerprint: str = Field(description="of the model that wrote it")
    version: str = Field(description="of the trainer")
    recipe: str
    dataset: str
    width: int = Field(gt=0)
    every_hours: float = Field(gt=0, description="time between ticks")
    trigger: str | None = Field(default=None, description="events that refresh at once")
    begin_ms: int = Field(description="end of the first tick")
    until_ms: int = Field(description="end of the last one")
    past: str | None = Field(
        default=None, description="hash of what the log said before that; None: of an older folder"
    )
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class EmbeddingRows:
    """Embeddings of users at times.

    Attributes:
        users: int64 (R,).
        valid_from_ms: int64 (R,).
        values: float32 (R, U).
    """

    users: np.ndarray
    valid_from_ms: np.ndarray
    values: np.ndarray


def read_manifest(folder: Path, where: str) -> Manifest:
    """Read the manifest of a folder of embeddings.

    Args:
        folder: holds it.
        where: who names the folder, for messages.

    Raises:
        DataError: there is none, or it is not one.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise _refused(where, f"hold {MANIFEST}, as gem predict --embeddings writes it", folder)
    raw: Any = None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        found = Manifest.model_validate(raw)
    except ValidationError as fault:
        raise DataError(f"{path}: {explain(fault, raw, Manifest)}") from None
    except ValueError as fault:
        raise _refused(where, f"hold a {MANIFEST} that is JSON", f"{path}: {fault}") from None
    if found.format != FORMAT:
        raise _refused(where, f"be of format {FORMAT}", f"{found.format} in {path}")
    return found


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, whole or not at all.

    Args:
        folder: holds the parts.
        manifest: lists them.
    """
    partial = folder / f".{MANIFEST}.partial"
    partial.write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
    partial.rename(folder / MANIFEST)


def write_part(folder: Path, until_ms: int, rows: EmbeddingRows, fingerprint: str) -> Part:
    """Write the embeddings of a tick; equal rows give equal bytes.

    Args:
        folder: where to.
        until_ms: end of the tick.
        rows: sorted by time and user, at least one.
        fingerprint: of the model.

    Returns:
        its entry in the manifest.
    """
    name = f"part-{until_ms:015d}.parquet"
    width = rows.values.shape[1]
    flat = pa.array(np.ascontiguousarray(rows.values, np.float32).reshape(-1), pa.float32())
    table = pa.table(
        {
            "user": pa.array(rows.users, pa.int64()),
            "valid_from_ms": pa.array(rows.valid_from_ms, pa.int64()),
            "embedding": pa.FixedSizeListArray.from_arrays(flat, width),
        }
    ).replace_schema_metadata({_FINGERPRINT: fingerprint, _FORMAT_KEY: str(FORMAT)})
    partial = folder / f".{name}.partial"
    pq.write_table(table, partial, write_page_checksum=True)
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.rename(folder / name)
    return Part(
        file=name, until_ms=until_ms, rows=len(rows.users), users=len(np.unique(rows.users))
    )


def read_parts(folder: Path, manifest: Manifest, where: str) -> EmbeddingRows:
    """Read all embeddings of a folder.

    Args:
        folder: holds the parts.
        manifest: lists them.
        where: who names the folder, for messages.

    Returns:
        the rows, in the order of the parts.

    Raises:
        DataError: a part is missing, damaged, of another model or of another width.
    """
    parts = [_read_part(folder / part.file, part, manifest, where) for part in manifest.parts]
    return EmbeddingRows(
        _joined([part.users for part in parts], np.zeros(0, np.int64)),
        _joined([part.valid_from_ms for part in parts], np.zeros(0, np.int64)),
        _joined([part.values for part in parts], np.zeros((0, manifest.width), np.float32)),
    )


def _read_part(path: Path, part: Part, manifest: Manifest, where: str) -> EmbeddingRows:
    try:
        table = pq.read_table(path, page_checksum_verification=True)
        user, valid_from, values = (table[name].combine_chunks() for name in _COLUMNS)
    except (pa.ArrowException, KeyError, OSError) as fault:
        raise _refused(where, "hold every part whole", f"{path}: {fault}") from None
    metadata = table.schema.metadata or {}
    if metadata.get(_FINGERPRINT, b"").decode() != manifest.fingerprint:
        raise _refused(where, "be of one model", f"{path} of another one")
    kind = values.type
    if not pa.types.is_fixed_size_list(kind) or kind.list_size != manifest.width:
        raise _refused(where, f"have vectors of {manifest.width} numbers", f"{kind} in {path}")
    if len(table) != part.rows or sum(c.null_count for c in (user, valid_from, values)):
        raise _refused(where, f"have {part.rows} rows without a gap", f"{len(table)} in {path}")
    flat = np.asarray(values.flatten(), np.float32)
    if not np.isfinite(flat).all():
        raise _refused(where, "hold finite numbers", path)
    return EmbeddingRows(
        np.asarray(user, np.int64),
        np.asarray(valid_from, np.int64),
        flat.reshape(-1, manifest.width),
    )


def _joined(parts: Sequence[np.ndarray], none: np.ndarray) -> np.ndarray:
    return np.concatenate([none, *parts])


def _refused(where: str, must: str, got: object) -> DataError:
    return DataError(
        refusal(
            "gem data",
            where,
            must=must,
            got=got,
            fix="write it again with gem predict --embeddings",
        )
    )
