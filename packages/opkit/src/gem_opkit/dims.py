"""The legend of dim letters, and the check that makes shape suffixes tell the truth.

A tensor's name ends in an underscore and one letter per dim: ``q_THK`` has tokens, heads and
head width. Upper case is the whole dim, lower case the part that this worker holds (a tile in a
kernel, a shard in a mesh), so ``T`` and ``t`` are two dims. Imports no torch: anything with a
``shape`` can be checked.
"""

from pathlib import Path
from typing import Any

from gem_opkit.errors import DtypeError, ShapeError

LEGEND: dict[str, str] = {
    "B": "sequences",
    "O": "offsets, always B+1",
    "T": "packed query tokens",
    "S": "packed key/value tokens",
    "N": "padded length",
    "P": "pooled queries per sequence",
    "H": "query heads",
    "G": "key/value heads",
    "K": "head width of q and k",
    "V": "head width of v",
    "D": "model width",
    "F": "feed-forward width",
    "X": "experts",
    "M": "scale blocks along the last axis",
    "R": "table rows",
    "I": "packed ids",
    "E": "embedding width",
    "A": "tasks",
    "W": "ranks",
}

# Both cases, as one string: a substring test is what Dynamo traces most cheaply.
_LETTERS = "".join(LEGEND) + "".join(LEGEND).lower()


def check_shapes(op: str, **tensors: Any) -> dict[str, int]:
    """Check tensors against the suffixes of their own names.

    Each letter is bound by the first tensor that has it; a later tensor that disagrees is an
    error. ``O`` binds ``B`` as its size minus one. A letter may repeat in a suffix (``m_DD`` is
    square). Call it first in every public operator. It reads shapes only, never values, and
    ``torch.compile(fullgraph=True, dynamic=True)`` traces it; inside a full graph Dynamo replaces
    the message of an error, so run one eager step first.

    Args:
        op: name of the operator, for the message.
        **tensors: tensors under the names that they have in the operator's signature. None
            (an optional tensor that was not given) is passed over.

    Returns:
        letter -> size of every letter that was bound; ``O`` appears as ``B``.

    Raises:
        ShapeError: a name without a suffix, a letter outside the legend, a wrong number of dims,
            or two tensors that disagree.
        DtypeError: a value that has no shape.

    Example:
        ``check_shapes("jagged_mean", values_TD=values_TD, offsets_O=offsets_O)``
    """
    sizes: dict[str, int] = {}
    owners: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        suffix = _suffix(op, name)
        shape = getattr(tensor, "shape", None)
        if shape is None:
            raise DtypeError(
                f"{op}: {name} must be a tensor; got {type(tensor).__name__}; "
                f"convert it with torch.as_tensor"
            )
        if len(shape) != len(suffix):
            raise ShapeError(
                f"{op}: {name} must have {len(suffix)} dims ({suffix}); "
                f"got shape {tuple(shape)}; reshape it or pass the tensor that the name promises"
            )
        for letter, size in zip(suffix, shape, strict=True):
            bound = letter
            if letter in "Oo":
                if size == 0:
                    raise ShapeError(
                        f"{op}: {name} must have at least one offset ({letter} is B+1); "
                        f"got shape {tuple(shape)}; offsets of an empty batch are [0]"
                    )
                bound = "B" if letter == "O" else "b"
                size = size - 1
            if bound not in sizes:
                sizes[bound] = size
                owners[bound] = name
            elif sizes[bound] != size:
                raise ShapeError(_conflict(op, name, bound, size, owners[bound], sizes[bound]))
    return sizes


def _suffix(op: str, name: str) -> str:
    stem, underscore, suffix = name.rpartition("_")
    if not underscore or not stem or not suffix:
        raise ShapeError(
            f"{op}: {name} must end in an underscore and its dim letters; "
            f"got no suffix; name it like values_TD"
        )
    for letter in suffix:
        if letter not in _LETTERS:
            raise ShapeError(
                f"{op}: {name} must use the dim letters {''.join(LEGEND)}; got {letter!r}; "
                f"see gem_opkit.dims.LEGEND"
            )
    return suffix


def _conflict(op: str, name: str, letter: str, size: int, owner: str, owned: int) -> str:
    meaning = LEGEND[letter.upper()]
    local = "" if letter.isupper() else "local "
    fix = f"use one number of {local}{meaning} for both"
    if owner == name:
        return f"{op}: {name} has {letter}={size} and {letter}={owned}; {fix}"
    return f"{op}: {name} has {letter}={size} but {owner} has {letter}={owned}; {fix}"


def dims_markdown() -> str:
    """Write the legend as the page ``docs/dims.md``.

    Returns:
        Markdown with one table row a letter, ending in a newline.
    """
    rows = "\n".join(f"| `{letter}` | {meaning} |" for letter, meaning in LEGEND.items())
    return (
        "# Dim letters\n\n"
        "Generated from `gem_opkit.dims.LEGEND` by `gem_opkit.dims.write_dims_markdown`; "
        "do not edit.\n\n"
        "A tensor's name ends in an underscore and one letter per dim: `x_TD` is jagged, "
        "`x_BND` is padded. Upper case is the whole dim, lower case the part that this worker "
        "holds: a tile in a kernel (`q_tk`), a shard in a mesh (`w_xDF`). "
        "`check_shapes` holds every public operator to it.\n\n"
        f"| letter | meaning |\n| --- | --- |\n{rows}\n"
    )


def write_dims_markdown(path: Path | str) -> None:
    """Write ``dims_markdown`` to a file.

    Args:
        path: where to write, by convention ``docs/dims.md``.
    """
    Path(path).write_text(dims_markdown(), encoding="utf-8")
