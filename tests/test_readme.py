"""What the pages say is true: paths exist, Python runs, commands run.

CONTRIBUTING.md ("Examples in pages") says how a block is marked. Unmarked blocks run as they stand:
Python in a process of its own, commands in a copy of the repository that the blocks of one page
share. Marked blocks cannot run here; what they name is looked up.
"""

import ast
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/*.md", "packages/*/*.md", "results/*.md")
    for page in ROOT.glob(pattern)
    if page.name != "CHANGELOG.md"
)
PACKAGES = sorted(file.parent for file in ROOT.glob("packages/*/pyproject.toml"))

PYTHON = {"python"}
SHELL = {"bash", "sh", "console"}
SHOWN = {"text", "toml", "json", "mermaid"}
MARKS = {"gpu", "multi-gpu", "nox", "network", "data"}

TOP_FOLDERS = ("packages/", "docs/", "tests/", "tools/", "results/", ".ci/")
TEST_LINE = "python3 -m venv .venv && .venv/bin/pip install nox && .venv/bin/nox -s test"
DEMO_LINE = "python3 -m venv .venv && .venv/bin/pip install nox && .venv/bin/nox -s demo"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    mark: str
    text: str

    def __str__(self) -> str:
        """Name the test after the place, so that a failure can be found."""
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    blocks: list[Block] = []
    start, info, fence, lines = 0, "", "", list[str]()
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        opening = re.match(r"( *)(```+)(.*)", line)
        if not fence and opening:
            start, fence, info, lines = number, opening[2], opening[3], []
        elif fence and line.strip() == fence:
            language, _, mark = info.strip().partition(" ")
            blocks.append(Block(page, start, language, mark.strip(), "\n".join(lines) + "\n"))
            fence = ""
        elif fence:
            lines.append(line)
    assert not fence, f"{page}:{start}: the block is not closed"
    return blocks


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def chosen(languages: set[str], *, marked: bool) -> list[Block]:
    return [b for b in BLOCKS if b.language in languages and bool(b.mark) == marked]


def prose_of(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^( *)(```+).*?^ *\2 *$", "", text, flags=re.MULTILINE | re.DOTALL)


# ------------------------------------------------------------------------------------------ paths


def test_pages_are_found():
    names = {page.relative_to(ROOT).as_posix() for page in PAGES}
    assert {"README.md", "CONTRIBUTING.md", "docs/architecture.md"} <= names
    assert {f"packages/{package.name}/README.md" for package in PACKAGES} <= names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_paths_exist(page: Path):
    prose = prose_of(page)
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        path = target.partition("#")[0]
        outside = "://" in path or path.startswith("mailto:")
        if path and not outside and not (page.parent / path).exists():
            missing.append(target)
    for span in re.findall(r"`([^`\n]+)`", prose):
        pattern = re.search(r"[<>*{}$ ]|\.\.\.", span)
        # "tests/contract.json" in a page about all packages is a place in each of them.
        places = [ROOT / span, page.parent / span, *(package / span for package in PACKAGES)]
        if span.startswith(TOP_FOLDERS) and not pattern and not any(p.exists() for p in places):
            missing.append(span)
    assert missing == []


# ----------------------------------------------------------------------------------------- blocks


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block_says_what_it_is(block: Block):
    assert block.language in PYTHON | SHELL | SHOWN
    assert block.mark in MARKS | {""}
    if block.language == "toml":
        tomllib.loads(block.text)


@pytest.mark.parametrize("block", chosen(PYTHON, marked=False), ids=str)
def test_python_runs(block: Block, tmp_path: Path):
    program = tmp_path / "block.py"
    program.write_text(block.text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        capture_output=True,
        check=False,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_marked_python_names_what_exists(page: Path):
    blocks = [block for block in chosen(PYTHON, marked=True) if block.page == page]
    for node in (node for block in blocks for node in ast.walk(ast.parse(block.text))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"


@pytest.fixture(scope="module")
def repository_files() -> list[str]:
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


# One test a page, as its blocks run in their order; pages can be shared out.
@pytest.mark.parametrize(
    "page",
    dict.fromkeys(block.page for block in chosen(SHELL, marked=False)),
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_commands_run(page: Path, repository_files: list[str], tmp_path: Path):
    # In a copy of the repository: what commands write stays out of the original.
    for name in repository_files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    for block in chosen(SHELL, marked=False):
        if block.page == page:
            run_block(block, tmp_path)


def run_block(block: Block, folder: Path) -> None:
    script = block.text
    if block.language == "console":
        script = "\n".join(re.findall(r"^\$ (.*)", script, re.MULTILINE))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            # An install is resolved word for word, from what is here: it must neither need an
            # index nor replace what the session has installed.
            "PIP_DRY_RUN": "1",
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{block}: {done.stdout}"


# ------------------------------------------------------------------------------- marked commands


def commands_of(block: Block) -> list[list[str]]:
    """Split a script into simple commands, each a list of words."""
    script = block.text
    if block.language == "console":
        script = "\n".join(re.findall(r"^\$ (.*)", script, re.MULTILINE))
    commands: list[list[str]] = []
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.wordchars += "[],=:@%+{}$"
        commands.append([])
        for word in lexer:
            if set(word) <= set("&|;<>()"):
                commands.append([])
            else:
                commands[-1].append(word)
    return [words for words in commands if words]


COMMANDS = [(block, words) for block in chosen(SHELL, marked=True) for words in commands_of(block)]
INSTALLS = [
    (block, words)
    for block in BLOCKS
    if block.language in SHELL
    for words in commands_of(block)
    if ("pip" in words[0] and "install" in words) or words[1:4] == ["-m", "pip", "install"]
]


@cache
def nox_sessions() -> set[str]:
    """Read the session names from the noxfile, with their parameters."""
    names: set[str] = set()
    packages = {package.name for package in PACKAGES}
    for node in ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        marks = " ".join(map(ast.unparse, node.decorator_list))
        if "nox.session" in marks:
            names.add(node.name)
            if "EACH_PACKAGE" in marks or "PACKAGES" in marks:
                names |= {f"{node.name}({package})" for package in packages}
            if "'repo'" in marks:
                names.add(f"{node.name}(repo)")
    return names


@cache
def gem_help(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "gem", *words, "--help"],
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_gem_command(words: list[str]) -> None:
    """Check that ``gem`` has the command and each option that stands behind it."""
    command: list[str] = []
    while len(command) < len(words) and "Commands" in gem_help(*command):
        word = words[len(command)]
        if word.startswith("-"):
            break
        assert re.search(rf"^\W*{re.escape(word)}\s", gem_help(*command), re.MULTILINE), (
            f"gem {' '.join(command)} has no command {word}"
        )
        command.append(word)
    for word in words[len(command) :]:
        option = word.partition("=")[0]
        if option.startswith("--"):
            known = re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", gem_help(*command))
            assert known, f"gem {' '.join(command)} has no option {option}"


def check_nox_command(words: list[str]) -> None:
    """Check that the noxfile has each session that is asked for."""
    if "-s" not in words:
        return
    for word in words[words.index("-s") + 1 :]:
        if word.startswith("-"):
            break
        assert word in nox_sessions(), f"the noxfile has no session {word}"


def check_paths(words: list[str]) -> None:
    """Check that what looks like a place in the repository is there, with its extra."""
    for word in words:
        path, _, extra = word.removeprefix("./").partition("[")
        if not (word.startswith("./") or path.startswith(TOP_FOLDERS)):
            continue
        assert (ROOT / path).exists(), f"{word} does not exist"
        if extra:
            table = tomllib.loads((ROOT / path / "pyproject.toml").read_text(encoding="utf-8"))
            assert set(extra.rstrip("]").split(",")) <= set(
                table["project"]["optional-dependencies"]
            )


@pytest.mark.parametrize(("block", "words"), COMMANDS, ids=lambda value: str(value))
def test_marked_command_names_what_exists(block: Block, words: list[str]):
    subprocess.run(["bash", "-n", "-c", block.text], check=block.language != "console")
    while words and re.fullmatch(r"\w+=.*", words[0]):  # variables before the command
        words = words[1:]
    check_paths(words)
    if Path(words[0]).name == "nox":
        check_nox_command(words)
    elif Path(words[0]).name == "gem":
        check_gem_command(words[1:])
    elif "gem" in words and words[words.index("gem") - 1] == "-m":
        check_gem_command(words[words.index("gem") + 1 :])


@pytest.mark.parametrize(("block", "words"), INSTALLS, ids=lambda value: str(value))
def test_install_line_names_every_local_package_that_it_needs(block: Block, words: list[str]):
    tables = {
        package.name: tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))
        for package in PACKAGES
    }
    folder_of = {table["project"]["name"]: folder for folder, table in tables.items()}
    named = {m[1] for word in words if (m := re.match(r"(?:\./)?packages/(\w+)", word))}
    for folder in named:
        for text in tables[folder]["project"]["dependencies"]:
            needed = folder_of.get(re.split(r"[<>=~! \[]", text)[0])
            assert needed is None or needed in named, f"{block}: {folder} needs {needed}"


# --------------------------------------------------------------------------------- the root README


def test_the_two_lines_stand_word_for_word():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line.partition("#")[0].strip() for line in readme.splitlines()]
    assert DEMO_LINE in lines
    assert TEST_LINE in lines
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert TEST_LINE in [line.strip() for line in ci.splitlines()]


def test_the_walk_goes_by_plain_imports():
    """From each stop of the newcomer's walk, imports lead to the next by one file at most."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("\n## From the command line to the kernel\n")[2].partition("\n## ")[
        0
    ]
    items = re.findall(r"^\d+\. (.*)", section, re.MULTILINE)
    assert len(items) == 8
    assert "gem train synthetic-debug" in items[0]
    assert (ROOT / "packages/gem/src/gem/recipes/synthetic-debug.toml").exists()
    stops = []
    for item in items[1:]:
        target = re.search(r"\]\((packages/[^)]+\.py)\)", item)
        assert target, f"{item} links no file"
        stops.append(module_of(ROOT / target[1]))
    assert stops[0] == "gem.commands.training"
    modules = {module_of(file): file for file in ROOT.glob("packages/*/src/**/*.py")}
    for stop, following in pairwise(stops):
        near = imports_of(modules[stop])
        far = {name for module in near & modules.keys() for name in imports_of(modules[module])}
        assert following in near | far, f"no import leads from {stop} to {following}"


def module_of(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[parts.index("src") + 1 :])


def imports_of(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names
