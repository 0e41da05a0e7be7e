"""Which torch takes which fbgemm and torchrec: one table, and everything that repeats it."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from gem_embeddings.torchrec_engine.versions import FITS, INSTALL, fit_of, misfit

PACKAGE = Path(__file__).parents[1]
ROOT = PACKAGE.parents[1]


def test_the_constraints_fit_their_torch() -> None:
    lines = (ROOT / "constraints-torchrec.txt").read_text().splitlines()
    pins = {r.name: next(iter(r.specifier)).version for r in map(Requirement, lines[1:])}
    assert misfit(pins["torch"], pins["fbgemm-gpu-cpu"], pins["torchrec"]) == ""
    fit = fit_of(pins["torch"])
    assert fit is not None
    assert fit.tried


def test_the_extra_takes_what_the_table_takes() -> None:
    extras = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    (extra,) = map(Requirement, extras["optional-dependencies"]["torchrec"])
    for fit in FITS.values():
        assert extra.specifier.contains(fit.torchrec_least)
        assert not extra.specifier.contains(max("1.9", fit.torchrec_below))


def test_the_readme_has_the_same_table() -> None:
    text = (PACKAGE / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d\.\d+) \| (\d\.\d+)\.\* \| `(\S+)` \| (\w+)", text, re.MULTILINE)
    wanted = [
        (t, f.fbgemm, f">={f.torchrec_least},<{f.torchrec_below}", "yes" if f.tried else "no")
        for t, f in FITS.items()
    ]
    assert rows == wanted
    assert all(SpecifierSet(row[2]) for row in rows)
    assert INSTALL in " ".join(text.replace("\\\n", " ").split())


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        (("2.13.0+cpu", "1.8.0", "1.6.1"), ""),
        (("2.13.0+cpu", "1.8.0", "1.8.2"), ""),
        (("2.11.0+cu130", "1.6.0", "1.6.1"), ""),
        (("2.13.0+cpu", "1.9.0", "1.6.1"), "fbgemm-gpu is 1.9.0, and torch 2.13.0+cpu needs 1.8.*"),
        (("2.13.0", "1.10.0", None), "fbgemm-gpu is 1.10.0, and torch 2.13.0 needs 1.8.*"),
        (
            ("2.11.0", "1.6.0", "1.7.0"),
            "torchrec is 1.7.0, and torch 2.11.0 with fbgemm-gpu 1.6 needs >=1.6.1,<1.7",
        ),
        (
            ("2.13.0", None, "1.5.0"),
            "torchrec is 1.5.0, and torch 2.13.0 with fbgemm-gpu 1.8 needs",
        ),
        (("9.9.0", "1.8.0", "1.6.1"), ""),
        (("2.13.0", "1.8.0rc1", "1.6.1"), ""),
    ],
)
def test_a_misfit_is_named_with_what_fits(versions, says) -> None:
    assert misfit(*versions).startswith(says)
    assert bool(misfit(*versions)) == bool(says)


def test_without_torchrec_one_error_says_what_to_run(tmp_path) -> None:
    """In a process of its own: there both are files that fail as a wrong build does."""
    for name in ("torchrec", "fbgemm_gpu"):
        (tmp_path / f"{name}.py").write_text("raise OSError('undefined symbol: _ZN3c10')")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import gem_embeddings.torchrec_tables, gem_embeddings.keyed\n"
        "try: gem_embeddings.keyed.to_keyed({})\n"
        "except NotImplementedError as fault: print(fault)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "must have a torchrec and an fbgemm that load beside this torch" in done.stdout
    assert INSTALL in done.stdout
    assert 'use engine="torch"' in done.stdout
    # What is installed may not fit either; then that is the better reason.
    assert "undefined symbol: _ZN3c10" in done.stdout or torch.__version__ in done.stdout
