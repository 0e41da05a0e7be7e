"""Of which raw files a data set was made, so that a folder of old rows is not taken for new ones.

`sources.json` lies in the folder of the data set: the files that each pattern of names found, with
size, time of change and SHA-256. A data set without it, and files that are no longer there, tell
nothing: a data set outlives its raw files.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from gem.data.dataset import SOURCES_FILE
from gem.data.declared.files import find_files
from gem.data.declared.load import load_declaration
from gem_opkit.errors import ConfigError, DataError, refusal


class RawFile(BaseModel):
    """What a file was when it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    size: int
    mtime_ns: int
    sha256: str


class Sources(BaseModel):
    """The content of `sources.json`.

    Attributes:
        folder: of the raw files, absolute.
        files: per pattern of names, the files that it found, in the order in which they were read.
        declaration: absolute path of the TOML file that declares the log; none for others.
        digest: of that declaration.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: str
    files: dict[str, list[RawFile]]
    declaration: str | None = None
    digest: str | None = None


def sources_of(folder: Path, patterns: Iterable[str]) -> Sources:
    """Look at raw files, before they are read.

    Args:
        folder: of the raw files.
        patterns: names of files in it or in a folder below; `*` stands for any text.

    Raises:
        DataError: one cannot be read.

    Cost: every file is read once, at about 1 GB/s.
    """
    files = {pattern: [_seen(path) for path in find_files(folder, pattern)] for pattern in patterns}
    return Sources(folder=str(folder.resolve()), files=files)


def refuse_changed(sources: Sources) -> None:
    """Refuse raw files that changed while they were read.

    Args:
        sources: of `sources_of`, from before.

    Raises:
        DataError: one is another one now.
    """
    if found := _difference(sources, Path(sources.folder)):
        raise DataError(
            refusal(
                "gem data prepare",
                found[0],
                must="stay as it is while it is read",
                got=found[1],
                fix="begin again when nothing writes it",
            )
        )


def refuse_stale(out: Path, *, source: Path | None = None) -> None:
    """Refuse a data set whose raw files, or whose declaration, are other ones today.

    Args:
        out: folder of the data set; one without `sources.json` is taken as it is.
        source: folder of the raw files; None: where they lay, and the declaration has to be the
            same, too.

    Raises:
        DataError: a file differs from what was read, or `sources.json` is damaged.

    Cost: a look at each file; one of the same size with another time of change is read.
    """
    path = out / SOURCES_FILE
    if not path.is_file():
        return
    try:
        sources = Sources.model_validate_json(path.read_bytes())
    except ValidationError:
        raise DataError(
            refusal(
                "gem data",
                str(path),
                must="say of which files the data set was made",
                got="something else",
                fix=f"make the data set again, or remove {path} to use it as it is",
            )
        ) from None
    if source is None:
        found = _difference(sources, Path(sources.folder)) or _other_declaration(sources)
    else:
        found = _difference(sources, source)
    if found:
        raise DataError(
            refusal(
                "gem data",
                str(out),
                must=f"be made of {found[0]} as it is now",
                got=f"older rows: since then {found[1]}",
                fix=f"make a data set in a fresh folder (--out, data.folder), or remove {out} and "
                "make it again",
            )
        )


def _difference(sources: Sources, folder: Path) -> tuple[str, str] | None:
    """The first file that is another one, and in what; None where all that are there agree."""
    for pattern, known in sources.files.items():
        paths = find_files(folder, pattern)
        if not paths:
            continue
        if len(paths) != len(known):
            return str(folder / pattern), f"{len(known)} files became {len(paths)}"
        for path, was in zip(paths, known, strict=True):
            status = path.stat()
            if status.st_size != was.size:
                return str(path), f"its {was.size:,} bytes became {status.st_size:,}"
            if status.st_mtime_ns != was.mtime_ns and _sha256(path) != was.sha256:
                return str(path), "its content changed"
    return None


def _other_declaration(sources: Sources) -> tuple[str, str] | None:
    name = sources.declaration
    if name is None or not Path(name).is_file():
        return None
    try:
        same = load_declaration(name)[1] == sources.digest
    except ConfigError:  # while it is being written: another one, too
        same = False
    return None if same else (name, "the declaration changed")


def _seen(path: Path) -> RawFile:
    status = path.stat()  # before the content: a change in between shows
    return RawFile(
        name=path.name, size=status.st_size, mtime_ns=status.st_mtime_ns, sha256=_sha256(path)
    )


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as fault:
        raise DataError(
            refusal(
                "gem data prepare",
                str(path),
                must="be readable",
                got=f"{fault.strerror or fault}",
                fix="check its permissions and the disk",
            )
        ) from fault


def sources_text(sources: Sources) -> str:
    """The content of `sources.json`.

    Args:
        sources: what it says.
    """
    return json.dumps(sources.model_dump(exclude_none=True), indent=1) + "\n"
