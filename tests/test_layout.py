"""The tree keeps its shape: fixed files in every operator's folder, fixed names in its tests."""

import ast
import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from gem_opkit.dims import dims_markdown

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(file.parent for file in ROOT.glob("packages/*/pyproject.toml"))
OPERATORS = sorted(
    folder
    for folder in ROOT.glob("packages/*/src/*/kernels/*")
    if folder.is_dir() and folder.name != "__pycache__"
)

OPERATOR_FILES = {"__init__.py", "reference.py", "op.py", "cost.py", "cases.py"}
ARCHITECTURE_FILES = {"kernel_sm90.py", "kernel_sm100.py"}
OPERATOR_TESTS = [
    "test_reference_gradients",
    "test_registration",
    "test_compiles_whole",
    "test_interpreted_kernel",
    "test_kernel_on_gpu",
    "test_ragged_edges",
    "test_alone_equals_in_batch",
    "test_refuses",
]
KERNEL_TESTS = {"test_interpreted_kernel", "test_kernel_on_gpu"}

RESULT_FIELDS = {"bench", "case", "device", "commit", "versions", "measured_at"}
# What a row that times an operator holds besides.
TIMING_FIELDS = {
    *("gpus", "dtype", "shapes", "flops", "bytes", "ms", "calls"),
    *("peak_frac", "ceiling_frac", "peers", "peak_source", "ceilings"),
}
# Benchmarks of whole runs: their rows hold metrics and speed of training, not one operator's time.
RUN_BENCHES = {
    *("quality", "ablation", "stages", "metrics", "faults", "long_histories", "reader"),
    *(
        "large_tables",
        "fully_sharded",
        "step",
        "step_reference",
        "step_check",
        "step_endure",
        "collectives",
    ),
    *("balance", "balance_step", "precision_ne", "memory", "gathers", "copy_engine"),
    *("scaling", "one_rank", "known_rates", "precision_step", "precision_guard"),
    *("gathers_in_8_bits", "serving"),
}

# A drawer: its name says nothing of what is in it.
DRAWERS = re.compile(
    r"(utils?|common|helpers?|base|misc|managers?|handlers?)|.*_(v\d+|manager|handler)"
)
# Places that exist on one machine only, and hosts of package registries.
PRIVATE = re.compile(
    r"(?<![\w.])[/]root[/]|[/]home[/]\w+[/]|[/]Users[/]\w+[/]"
    r"|pypi\.org|pythonhosted\.org|pytorch\.org[/]whl|registry\.npmjs|files\.[a-z]+\.org"
    r"|--(?:extra-)?index-url"
)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def repository_files() -> list[Path]:
    """Files that are tracked, or would be: not what commands make."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def import_folder(package: Path) -> Path:
    table = tomllib.loads((package / "pyproject.toml").read_text())
    return package / Path(table["tool"]["hatch"]["version"]["path"]).parent


def test_the_tree_has_packages_and_operators():
    assert len(PACKAGES) == 7
    assert OPERATORS


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_package_has_its_rooms(package: Path):
    source = import_folder(package)
    for needed in ("README.md", "CHANGELOG.md", "tests/smoke.py"):
        assert (package / needed).exists(), f"{relative(package)} lacks {needed}"
    assert (source / "py.typed").exists()
    # A wheel takes its licence from its own folder.
    assert (package / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    if (source / "contract.py").exists():
        assert (package / "tests" / "contract.json").exists()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_init_files_hold_the_version_and_nothing_else(package: Path):
    top = import_folder(package) / "__init__.py"
    for file in package.glob("src/**/__init__.py"):
        body = ast.parse(file.read_text()).body
        if file == top:
            if isinstance(body[0], ast.Expr):  # a docstring may stand above it
                body = body[1:]
            assert [ast.unparse(node).partition(" = ")[0] for node in body] == ["__version__"]
        else:
            assert body == [], f"{relative(file)} must be empty"


@pytest.mark.parametrize("operator", OPERATORS, ids=relative)
def test_operator_folder_has_the_fixed_files(operator: Path):
    files = {path.name for path in operator.iterdir()} - {"__pycache__"}
    allowed = OPERATOR_FILES | {"kernel.py"}
    if "kernel.py" in files:
        allowed |= ARCHITECTURE_FILES
    assert files >= OPERATOR_FILES
    assert files <= allowed


@pytest.mark.parametrize("operator", OPERATORS, ids=relative)
def test_operator_has_the_fixed_tests_and_a_benchmark(operator: Path):
    package = operator.parents[3]
    tests = package / "tests" / f"test_{operator.name}.py"
    names = [
        node.name
        for node in ast.parse(tests.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    has_kernel = (operator / "kernel.py").exists()
    expected = [name for name in OPERATOR_TESTS if has_kernel or name not in KERNEL_TESTS]
    assert names[: len(expected)] == expected
    assert set(names).isdisjoint(KERNEL_TESTS) or has_kernel
    assert (package / "benchmarks" / f"bench_{operator.name}.py").exists()


def test_no_file_is_a_drawer():
    drawers = [
        relative(file)
        for file in repository_files()
        if file.suffix == ".py"
        and any(
            DRAWERS.fullmatch(part.removesuffix(".py")) for part in file.parts[len(ROOT.parts) :]
        )
    ]
    assert drawers == []


def test_no_file_names_a_private_place():
    found = []
    for file in repository_files():
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # not text
            continue
        if PRIVATE.search(text) or f"{ROOT}/" in text:
            found.append(relative(file))
    assert found == []


def test_import_rules_name_every_package():
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    names = {import_folder(package).name for package in PACKAGES}
    assert set(rules["root_packages"]) == names
    layers = next(rule["layers"] for rule in rules["contracts"] if rule["id"] == "layers")
    assert set(re.findall(r"\w+", " ".join(layers))) == names
    protected = {
        module
        for rule in rules["contracts"]
        if rule["type"] == "protected"
        for module in rule["protected_modules"]
    }
    owners = {operator.parents[1].name for operator in OPERATORS}
    assert protected >= {f"{owner}.kernels.**" for owner in owners}


def test_page_of_dims_is_the_legend_of_the_code():
    assert (ROOT / "docs" / "dims.md").read_text() == dims_markdown()


ROOMS = (
    *("", "data", "data/checks", "data/declared", "data/statistics"),
    *("model", "train", "report", "doctor", "planning", "dry_run", "bench", "memory", "scaling"),
    *("commands", "serving", "stages"),
)


@pytest.mark.parametrize("room", ROOMS)
def test_the_page_of_the_architecture_names_every_module(room: str):
    """A module without a place there is one that nobody will look for."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    source = next(import_folder(package) for package in PACKAGES if package.name == "gem")
    modules = {file.stem for file in (source / room).glob("*.py")} - {"__init__"}
    assert modules
    assert {name for name in modules if f"`{name}`" not in page} == set()
    folders = {str(file.parent.relative_to(source)) for file in source.rglob("*.py")}
    assert folders == {room or "." for room in ROOMS}


def test_the_page_of_the_architecture_names_no_module_that_is_not_there():
    page = (ROOT / "docs" / "architecture.md").read_text()
    rooms = page.partition("## The rooms of gem")[2].partition("## Where to look")[0]
    cells = [line.split(" | ")[-1] for line in rooms.splitlines() if line.startswith("| ")]
    named = {name for cell in cells for name in re.findall(r"`([a-z_]+)`", cell)}
    source = next(import_folder(package) for package in PACKAGES if package.name == "gem")
    there = {path.stem for path in source.rglob("*.py")}
    there |= {path.name for path in source.rglob("*") if path.is_dir()}
    assert len(named) > 80
    assert named <= there


def test_result_rows_say_what_was_measured():
    for file in ROOT.glob("results/*/*.jsonl"):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            assert row.keys() >= RESULT_FIELDS, relative(file)
            assert row["bench"] == file.stem
            if file.stem not in RUN_BENCHES:
                assert row.keys() >= TIMING_FIELDS, relative(file)
            assert row.get("peak_frac") is None or row["peak_frac"] <= 1
            # Of a copy: what reads more than it writes may beat it, but not the data sheet.
            assert row.get("ceiling_frac", 0) <= 1.15
            assert row["commit"], f"{relative(file)} has a row of no commit"
            assert not row["commit"].endswith("+dirty"), f"{relative(file)} has an unclean row"
