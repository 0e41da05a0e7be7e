"""Nearest neighbours of users among items: by comparing all of them, or by an index of faiss.

A user's vector and an item's are of one model, and their dot product is its score (the next-event
head of a user model). Which search runs is the caller's choice and never a fallback: an index is
approximate, and `recall` says by how much.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from gem.train.whole_file import check_new, partial_of
from gem_opkit.contract import Contract
from gem_opkit.errors import ConfigError, DataError, UnsupportedError, refusal

_FINGERPRINT, _FORMAT = b"gem_fingerprint", b"gem_format"
_DAMAGE = (pa.ArrowException, OSError)
# Scores that lie in memory at a time while all are compared.
_MOST_SCORES = 1 << 24


class SearchSpec(Contract):
    """How neighbours are found."""

    method: Literal["exact", "flat", "hnsw", "ivf"] = Field(
        default="exact",
        description="exact: every item, in numpy; with faiss: flat, every item; hnsw, a graph; "
        "ivf, clusters of which some are looked into",
    )
    links: int = Field(default=32, gt=0, description="of an item in the graph: hnsw")
    effort: int = Field(
        default=64, gt=0, description="items looked at a query: hnsw; clusters looked into: ivf"
    )
    clusters: int = Field(default=256, gt=0, description="ivf; at most a 39th of the items")
    seed: int = Field(default=0, ge=0, description="of the clusters: ivf")


@dataclass(frozen=True, slots=True)
class Vectors:
    """Vectors of users or of items.

    Attributes:
        keys: whose they are, int64 (n,).
        vectors: float32 (n, D).
        fingerprint: of the model that made them.
    """

    keys: np.ndarray
    vectors: np.ndarray
    fingerprint: str


def write_vectors(path: Path, name: str, found: Vectors) -> None:
    """Write vectors to Parquet.

    Args:
        path: the file.
        name: of the column of the keys, "user" or "item".
        found: the vectors; its fingerprint goes into the metadata.
    """
    width = found.vectors.shape[1]
    flat = pa.array(np.ascontiguousarray(found.vectors, np.float32).reshape(-1))
    columns = {
        name: pa.array(found.keys, pa.int64()),
        "embedding": pa.FixedSizeListArray.from_arrays(flat, width),
    }
    notes = {_FINGERPRINT: found.fingerprint.encode(), _FORMAT: b"1"}
    pq.write_table(pa.table(columns).replace_schema_metadata(notes), path)


def read_vectors(path: Path, name: str) -> Vectors:
    """Read vectors from a Parquet file, or of a folder of them the newest of each key.

    Args:
        path: a file, or a folder of files; of several rows of a key the last one with the greatest
            ``valid_from_ms`` counts.
        name: of the column of the keys.

    Returns:
        the vectors, by rising key.

    Raises:
        DataError: no such file, one of another format, or of several models.
    """
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise _refused(path, "hold Parquet files", "none", "write them with gem")
    tables = [_table(file, name) for file in files]
    marks = {table.schema.metadata[_FINGERPRINT].decode() for table in tables}
    if len(marks) != 1:
        raise _refused(path, "be of one model", f"{len(marks)} fingerprints", "write them again")
    widths = {table.schema.field("embedding").type.list_size for table in tables}
    if len(widths) != 1:
        raise _refused(path, "be of one width", sorted(widths), "write them again")
    keys = np.concatenate([table.column(name).to_numpy() for table in tables])
    times = np.concatenate(
        [
            table.column("valid_from_ms").to_numpy()
            if "valid_from_ms" in table.column_names
            else np.zeros(len(table), np.int64)
            for table in tables
        ]
    )
    rows = [table.column("embedding").combine_chunks().flatten().to_numpy() for table in tables]
    vectors = np.concatenate(rows).reshape(len(keys), widths.pop())
    if not np.isfinite(vectors).all():
        raise _refused(path, "be finite", "a vector that is not", "write them again")
    order = np.lexsort((times, keys))
    last = np.append(keys[order][1:] != keys[order][:-1], [True]) if len(keys) else order[:0]
    newest = order[np.asarray(last, bool)]
    return Vectors(keys[newest], vectors[newest], marks.pop())


def _table(path: Path, name: str) -> pa.Table:
    try:
        table = pq.read_table(path)
    except _DAMAGE as fault:
        raise _refused(path, "be a Parquet file", fault, "check the path") from fault
    notes = table.schema.metadata or {}
    vectors = table.schema.field("embedding").type if "embedding" in table.column_names else None
    if notes.get(_FORMAT) != b"1" or _FINGERPRINT not in notes or name not in table.column_names:
        got = ", ".join(table.column_names[:8])
        raise _refused(path, f"hold embeddings by {name}", f"columns {got}", "write it with gem")
    if vectors is None or not pa.types.is_fixed_size_list(vectors):
        raise _refused(path, "have vectors of one width", vectors, "write it with gem")
    numbers = pa.types.is_floating(vectors.value_type) and vectors.list_size > 0
    if not numbers:
        raise _refused(path, "have vectors of numbers", vectors, "write it with gem")
    for column in {name, "valid_from_ms"} & set(table.column_names):
        if not pa.types.is_integer(table.schema.field(column).type):
            kind = table.schema.field(column).type
            raise _refused(path, f"have whole numbers as {column}", kind, "write it with gem")
    for column in (name, "embedding", "valid_from_ms"):
        if column in table.column_names and (lost := _nulls(table.column(column))):
            raise _refused(path, f"have no null in {column}", f"{lost} nulls", "write it with gem")
    return table


def _nulls(column: pa.ChunkedArray) -> int:
    """Nulls of a column, those within its lists among them."""
    if not pa.types.is_fixed_size_list(column.type):
        return column.null_count
    return column.null_count + sum(chunk.flatten().null_count for chunk in column.chunks)


def nearest(
    users: Vectors, items: Vectors, count: int, spec: SearchSpec | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Find the items with the greatest dot product for each user.

    Args:
        users: who asks.
        items: of the same model.
        count: neighbours of each, at most the number of items.
        spec: how; none: exact.

    Returns:
        keys of items, int64 (users, count), best first, -1 where an index found fewer; and their
        scores, float32, -inf there. Equal scores are in the order of the keys under "exact".

    Raises:
        DataError: users and items are of different models.
        ConfigError: more neighbours than items.
        UnsupportedError: a method of faiss, and faiss is not installed.
    """
    spec = spec or SearchSpec()
    _check(users, items, count)
    if spec.method == "exact":
        places, scores = _exact(users.vectors, items.vectors, count)
    else:
        places, scores = _by_index(users.vectors, items.vectors, count, spec)
    keys = np.where(places < 0, np.int64(-1), items.keys[np.maximum(places, 0)])
    return keys, np.where(places < 0, np.float32(-np.inf), scores)


def recall(found: np.ndarray, exact: np.ndarray) -> float:
    """Share of the true neighbours that a search found.

    Args:
        found: keys of items, (users, k).
        exact: those of the exact search, (users, k).

    Returns:
        the mean over users, 0 .. 1; NaN without users.
    """
    hits = [len(np.intersect1d(a, b)) for a, b in zip(found, exact, strict=True)]
    return float(np.mean(hits) / exact.shape[1]) if hits else float("nan")


def search_named(method: str, effort: int) -> SearchSpec:
    """What a command line asks for.

    Args:
        method: its word.
        effort: how much an index looks at.

    Raises:
        ConfigError: no such method.
    """
    known = get_args(SearchSpec.model_fields["method"].annotation)
    if method not in known:
        raise ConfigError(
            refusal(
                "gem nearest",
                "--method",
                must=f"be one of {', '.join(known)}",
                got=repr(method),
                fix="correct it",
            )
        )
    return SearchSpec.model_validate({"method": method, "effort": effort})


def write_nearest(
    users: Path,
    items: Path,
    out: Path,
    *,
    count: int,
    spec: SearchSpec,
    with_recall: bool = False,
) -> dict[str, Any]:
    """Search for all users of a folder, and write what is found.

    Args:
        users: folder or file of embeddings of users; the newest of each counts.
        items: file of vectors of items.
        out: Parquet file to write, with the columns ``user``, ``rank`` (from 0), ``item`` and
            ``score``; must not be there.
        count: neighbours of each.
        spec: how they are found.
        with_recall: also search exactly, to compare.

    Returns:
        ``{file, users, items, count, method, fingerprint, recall}``; recall is null unless asked.

    Raises:
        ConfigError: the file is there, or more neighbours than items.
        DataError: as `read_vectors` and `nearest`.
        UnsupportedError: as `nearest`.
    """
    check_new(out, command="gem nearest")
    of_users, of_items = read_vectors(users, "user"), read_vectors(items, "item")
    keys, scores = nearest(of_users, of_items, count, spec)
    agree = None
    if with_recall:
        agree = recall(keys, nearest(of_users, of_items, count)[0])
    there = (keys >= 0).reshape(-1)
    table = pa.table(
        {
            "user": pa.array(np.repeat(of_users.keys, count)[there]),
            "rank": pa.array(np.tile(np.arange(count), len(of_users.keys))[there]),
            "item": pa.array(keys.reshape(-1)[there]),
            "score": pa.array(scores.reshape(-1)[there]),
        }
    )
    partial = partial_of(out)
    try:
        pq.write_table(table, partial)
        partial.rename(out)
    finally:
        partial.unlink(missing_ok=True)
    return {
        "file": str(out),
        "users": len(of_users.keys),
        "items": len(of_items.keys),
        "count": count,
        "method": spec.method,
        "fingerprint": of_users.fingerprint,
        "recall": agree,
    }


def _check(users: Vectors, items: Vectors, count: int) -> None:
    if users.fingerprint != items.fingerprint:
        raise DataError(
            refusal(
                "gem nearest",
                "users and items",
                must="have embeddings of one model",
                got=f"fingerprints {users.fingerprint[:12]} and {items.fingerprint[:12]}",
                fix="write both with the same run",
            )
        )
    if users.vectors.shape[1] != items.vectors.shape[1]:
        raise DataError(
            refusal(
                "gem nearest",
                "users and items",
                must="have vectors of one width",
                got=f"{users.vectors.shape[1]} and {items.vectors.shape[1]}",
                fix="write both with the same run",
            )
        )
    if not 0 < count <= len(items.keys):
        raise ConfigError(
            refusal(
                "gem nearest",
                "--count",
                must=f"lie in 1 .. {len(items.keys)}, the number of items",
                got=count,
                fix="lower it",
            )
        )


def _exact(users_UD: np.ndarray, items_ID: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    places = np.empty((len(users_UD), count), np.int64)
    scores = np.empty((len(users_UD), count), np.float32)
    step = max(1, _MOST_SCORES // max(len(items_ID), 1))
    for low in range(0, len(users_UD), step):
        found_UI = users_UD[low : low + step] @ items_ID.T
        # All that reach the score of the last place, so that ties go by the key alone.
        kth = np.partition(found_UI, -count, axis=1)[:, -count]
        for row, one_I in enumerate(found_UI):
            reach = np.flatnonzero(one_I >= kth[row])
            best = reach[np.argsort(-one_I[reach], kind="stable")][:count]
            places[low + row], scores[low + row] = best, one_I[best]
    return places, scores


def _by_index(
    users_UD: np.ndarray, items_ID: np.ndarray, count: int, spec: SearchSpec
) -> tuple[np.ndarray, np.ndarray]:
    try:
        import faiss  # pyright: ignore[reportMissingImports] - an extra
    except ImportError as fault:
        raise UnsupportedError(
            refusal(
                "gem nearest",
                f"--method {spec.method}",
                must="have the extra retrieval installed",
                got=f"no package {fault.name}",
                fix='pip install "gem-trainer[retrieval]", or use --method exact',
            )
        ) from fault
    index = _index(faiss, items_ID, spec)
    index.add(np.ascontiguousarray(items_ID))
    scores, places = index.search(np.ascontiguousarray(users_UD), count)
    return places, scores


def _index(faiss: Any, items_ID: np.ndarray, spec: SearchSpec) -> Any:
    width, metric = items_ID.shape[1], faiss.METRIC_INNER_PRODUCT
    if spec.method == "flat":
        return faiss.IndexFlatIP(width)
    if spec.method == "hnsw":
        index = faiss.IndexHNSWFlat(width, spec.links, metric)
        index.hnsw.efConstruction, index.hnsw.efSearch = max(spec.effort, 40), spec.effort
        return index
    clusters = min(spec.clusters, max(1, len(items_ID) // 39))  # faiss asks for 39 points of each
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(width), width, clusters, metric)
    index.cp.seed, index.nprobe = spec.seed, min(spec.effort, clusters)
    index.train(np.ascontiguousarray(items_ID))
    return index


def _refused(path: Path, must: str, got: object, fix: str) -> DataError:
    return DataError(refusal("gem nearest", str(path), must=must, got=got, fix=fix))
