"""Versions agree: with the changelogs, with one another, and with the constraints."""

import ast
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
TABLES = {
    file.parent: tomllib.loads(file.read_text())
    for file in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
PACKAGES = list(TABLES)


def version_of(package: Path) -> str:
    file = package / TABLES[package]["tool"]["hatch"]["version"]["path"]
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{file} has no __version__")


VERSIONS = {
    canonicalize_name(table["project"]["name"]): version_of(package)
    for package, table in TABLES.items()
}


def requirements_of(package: Path) -> list[Requirement]:
    table = TABLES[package]
    project = table["project"]
    extras = project.get("optional-dependencies", {})
    texts = [*project["dependencies"], *extras["test"], *table["build-system"]["requires"]]
    return [Requirement(text) for text in texts]


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in found}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_version_is_the_head_of_the_changelog(package: Path):
    changelog = (package / "CHANGELOG.md").read_text()
    head = re.search(r"^## \[(\d[^\]]*)\] - \d{4}-\d\d-\d\d$", changelog, re.MULTILINE)
    assert head is not None
    assert head[1] == version_of(package)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_installed_version_is_the_written_one(package: Path):
    assert metadata.version(TABLES[package]["project"]["name"]) == version_of(package)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_ranges_admit_the_present_version_of_their_provider(package: Path):
    for requirement in requirements_of(package):
        provider = VERSIONS.get(canonicalize_name(requirement.name))
        if provider is None:
            continue
        assert requirement.specifier.contains(provider), f"{requirement} refuses {provider}"
        operators = sorted(part.operator for part in requirement.specifier)
        assert operators == ["<", ">="], f"{requirement} needs a lower and an upper bound"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_constraints_pin_what_a_package_requires(package: Path):
    pinned = pins()
    for requirement in requirements_of(package):
        name = canonicalize_name(requirement.name)
        if name in VERSIONS:
            continue
        assert name in pinned, f"constraints.txt does not pin {requirement.name}"
        (exact,) = pinned[name].specifier
        assert exact.operator == "=="
        assert requirement.specifier.contains(exact.version), f"{requirement}, pinned {exact}"


def test_constraints_leave_triton_to_torch():
    assert "triton" not in pins()


def test_constraints_for_torchrec_agree_with_the_others():
    pinned = pins()
    lines = (ROOT / "constraints-torchrec.txt").read_text().splitlines()
    both = 0
    for pin in (Requirement(line) for line in lines if line and not line.startswith("#")):
        name = canonicalize_name(pin.name)
        if name in pinned:
            assert pin.specifier == pinned[name].specifier
            both += 1
    assert both > 0
    table = tomllib.loads((ROOT / "tools/fbgemm-cpu-shim/pyproject.toml").read_text())
    assert set(table["project"]["dependencies"]) <= set(lines)
