"""Which torch takes which fbgemm and torchrec. Imports neither: it is read where they do not load.

fbgemm is compiled against one torch and says so only by an undefined symbol; torchrec is Python and
needs an fbgemm that has what it calls.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fit:
    """What goes with one torch.

    Attributes:
        fbgemm: its major and minor version, such as ``"1.8"``.
        torchrec_least: lowest torchrec that loads.
        torchrec_below: first torchrec that does not, or that nobody has tried.
        tried: whether the three were seen to run together; otherwise this is fbgemm's own table.
    """

    fbgemm: str
    torchrec_least: str = "1.6.1"
    torchrec_below: str = "1.9"
    tried: bool = False


# torch, major and minor -> what goes with it.
FITS: dict[str, Fit] = {
    "2.11": Fit("1.6", torchrec_below="1.7", tried=True),
    "2.12": Fit("1.7"),
    "2.13": Fit("1.8", tried=True),
    "2.14": Fit("1.9"),
}
INSTALL = (
    "pip install -c constraints-torchrec.txt ./tools/fbgemm-cpu-shim ./packages/opkit "
    "./packages/jagged ./packages/parallel './packages/embeddings[torchrec]'"
)


def fit_of(torch_version: str) -> Fit | None:
    """Find what goes with a torch.

    Args:
        torch_version: such as ``"2.13.0+cpu"``.

    Returns:
        its row of the table, or None for a torch that is not in it.
    """
    return FITS.get(".".join(torch_version.split(".")[:2]))


def misfit(torch_version: str, fbgemm_version: str | None, torchrec_version: str | None) -> str:
    """Say what does not go together, in one line.

    Args:
        torch_version: such as ``"2.13.0+cpu"``.
        fbgemm_version: None where it is not installed or nobody knows.
        torchrec_version: likewise.

    Returns:
        the fault; empty where none is known, as for a torch that is not in the table.
    """
    fit = fit_of(torch_version)
    if fit is None:
        return ""
    if fbgemm_version is not None and _numbers(fbgemm_version)[:2] != _numbers(fit.fbgemm):
        return f"fbgemm-gpu is {fbgemm_version}, and torch {torch_version} needs {fit.fbgemm}.*"
    if torchrec_version is not None:
        found = _numbers(torchrec_version)
        if not _numbers(fit.torchrec_least) <= found < _numbers(fit.torchrec_below):
            return (
                f"torchrec is {torchrec_version}, and torch {torch_version} with fbgemm-gpu "
                f"{fit.fbgemm} needs >={fit.torchrec_least},<{fit.torchrec_below}"
            )
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    """The leading whole numbers: (1, 8, 0) of ``"1.8.0+cpu"``."""
    numbers: list[int] = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)
