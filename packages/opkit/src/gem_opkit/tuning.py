"""Launch settings by shape bucket: a table of defaults, and a search that only a caller starts.

A kernel's best tile size depends on head width, precision and the order of magnitude of lengths,
not on each length. ``choose`` maps a call to one of few buckets and returns the setting of its
bucket: found by an earlier search on this kind of GPU, else the measured default. It never times
anything by itself, so new lengths cost nothing::

    with searching():
        step(batch)  # tries the candidates of every bucket that it meets, once

What a search finds is kept in a file of the user's cache folder (``GEM_CACHE_DIR``, else
``$XDG_CACHE_HOME/gem``, else ``~/.cache/gem``), one for each GPU and version of Triton. Where that
cannot be read or written, a warning says so once and the settings live as long as the process.
"""

import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from gem_opkit.errors import UnsupportedError, refusal

_NOT_KEPT = "what was found ends with this process"
_log = logging.getLogger("gem_opkit.tuning")
# Upper ends of the buckets of mean lengths, in tokens; beyond the last one all are alike.
_MEAN_TOKENS = (32, 64, 512)


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """How a tiled kernel is launched.

    Attributes:
        block_rows: rows of a tile of the side that a program owns.
        block_columns: rows of a tile of the side that it runs over.
        warps: warps of a program.
        stages: depth of software pipelining.
    """

    block_rows: int
    block_columns: int
    warps: int
    stages: int


def length_bucket(tokens: int, batch: int) -> int:
    """Return the bucket of a mean length, from host numbers.

    Args:
        tokens: tokens of all sequences.
        batch: number of sequences.

    Returns:
        the upper end of the bucket in tokens: 32, 64 or 512; 0 for what is longer.
    """
    return next((top for top in _MEAN_TOKENS if tokens <= top * batch), 0)


_lock = threading.RLock()
_searches = 0  # blocks of ``searching`` that are open
_found: dict[Path | None, dict[str, LaunchConfig]] = {}


@contextmanager
def searching() -> Iterator[None]:
    """Let kernels called inside the block search their buckets, once each.

    That holds for every thread of the process: on a GPU the backward runs on a thread of its own.

    Yields:
        nothing.

    Cost: every candidate of a new bucket is compiled and timed; the GPU is waited for. Not inside
        a CUDA graph capture.
    """
    global _searches
    with _lock:
        _searches += 1
    try:
        yield
    finally:
        with _lock:
            _searches -= 1


def choose(
    bucket: str,
    default: LaunchConfig,
    *,
    device: str,
    candidates: Sequence[LaunchConfig] = (),
    time_ms: Callable[[LaunchConfig], float] | None = None,
) -> LaunchConfig:
    """Return the launch setting of a bucket.

    Args:
        bucket: kernel, precision, widths and length bucket, written out.
        default: what the table of the kernel says.
        device: name of the GPU and version of Triton, from ``device_key``.
        candidates: settings that a search may try besides the default.
        time_ms: times a launch with a setting; raises where it cannot run.

    Returns:
        what a search found for this bucket, else the default.

    Raises:
        UnsupportedError: a search in which no setting ran.
    """
    path = _path(device)
    with _lock:
        found = _read(path)
        if bucket in found:
            return found[bucket]
        if not _searches or time_ms is None:
            return default
        best = _search(bucket, [default, *candidates], time_ms)
        found[bucket] = best
        _write(path, found)
        return best


def device_key(index: int | None) -> str:
    """Return what a setting was measured on.

    Args:
        index: of the CUDA device; None for Triton's interpreter.

    Returns:
        GPU and version of Triton, fit for a file name.
    """
    import torch
    import triton

    name = "interpreter" if index is None else torch.cuda.get_device_name(index)
    return re.sub(r"[^\w.]+", "-", f"{name}-triton-{triton.__version__}").lower()


def _search(
    bucket: str, candidates: Sequence[LaunchConfig], time_ms: Callable[[LaunchConfig], float]
) -> LaunchConfig:
    times: dict[LaunchConfig, float] = {}
    refused: Exception | None = None
    for config in dict.fromkeys(candidates):
        try:
            times[config] = time_ms(config)
        # Too little shared memory or too few registers have several error types in Triton; a
        # setting that cannot run here is not a candidate, whatever the reason.
        except Exception as error:  # noqa: BLE001
            refused = error
            _log.info("%s: %s cannot run: %s", bucket, config, error)
    if not times:
        raise UnsupportedError(
            refusal(
                "tuning.choose",
                bucket,
                must="have a setting that runs on this GPU",
                got=refused,
                fix='use impl="reference"',
            )
        ) from refused
    best = min(times, key=lambda config: times[config])
    _log.info("%s: %s takes %.4f ms, best of %d", bucket, best, times[best], len(times))
    return best


def _path(device: str) -> Path | None:
    """The file of a device; None where nobody knows the home of this user."""
    root = os.environ.get("GEM_CACHE_DIR")
    if not root:
        try:
            cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        except RuntimeError:  # a launch must not fail for that
            return None
        root = Path(cache) / "gem"
    return Path(root) / "tuning" / f"{device}.json"


def _read(path: Path | None) -> dict[str, LaunchConfig]:
    if path not in _found:
        _found[path] = {} if path is None else _stored(path)
    return _found[path]


def _stored(path: Path) -> dict[str, LaunchConfig]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        found = {bucket: LaunchConfig(**config) for bucket, config in stored.items()}
        for config in found.values():
            if not all(type(value) is int and value > 0 for value in asdict(config).values()):
                raise ValueError(f"{config} holds what is no count")
        return found
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, AttributeError) as error:
        _log.warning("%s is no table of launch settings and is not used: %s", path, error)
    return {}


def _write(path: Path | None, found: dict[str, LaunchConfig]) -> None:
    if path is None:
        _log.warning("there is no cache folder (set GEM_CACHE_DIR); %s", _NOT_KEPT)
        return
    # Several ranks may search at once: each keeps what others have found since it read the file,
    # writes a file of its own and moves it into place.
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        found = _stored(path) | found
        path.parent.mkdir(parents=True, exist_ok=True)
        stored = {bucket: asdict(config) for bucket, config in sorted(found.items())}
        unfinished.write_text(json.dumps(stored, indent=1), encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        _log.warning("%s cannot be written, and %s: %s", path, _NOT_KEPT, error)
