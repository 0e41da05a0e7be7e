"""Every check of the repository, one environment per package.

The packages and who depends on whom are read from ``packages/*/pyproject.toml``, so a new package
is named nowhere here. A session installs a package with its declared dependencies and nothing
else: an import that is not declared fails.

Installing is done in two parts. Other people's packages are pinned by ``constraints.txt`` and are
installed only when that file, a pyproject or the interpreter has changed. Our own packages are
built and installed anew every time, from their folders, without build isolation and without an
index. Together this makes every session but the first run without network. Where pip looks for
packages is the user's own setting; no session overrides it.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - a person may well start nox with an older one
    raise SystemExit(f"GEM needs Python 3.11 or newer; this is {sys.version.split()[0]}")

import hashlib
import json
import os
import re
import shutil
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import nox
from nox.command import CommandFailed
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

nox.options.sessions = ["lint", "types", "test"]
nox.options.reuse_venv = "yes"
nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_external_run = True

ROOT = Path(__file__).parent
CONSTRAINTS = ROOT / "constraints.txt"
# For tests where torch came without a triton: its interpreter runs the kernels on the CPU.
TRITON = "triton==3.8.0"
# A CUDA or ROCm build of torch brings its own triton.
ASK_TORCH = "import torch; print('has' if torch.version.cuda or torch.version.hip else 'lacks')"
STAMP = "gem-installed.json"
# Processes that share a package's tests: about 1.5 GB of memory each.
MOST_TEST_WORKERS = 4
# torchrec resolves to a CUDA build of fbgemm for another torch; these name the one that loads.
TORCHREC_CONSTRAINTS = ROOT / "constraints-torchrec.txt"
TORCHREC_SHIM = ROOT / "tools" / "fbgemm-cpu-shim"


@dataclass(frozen=True)
class Project:
    """One package of the repository, as its pyproject describes it."""

    folder: Path
    dist: str
    import_name: str
    local: tuple[str, ...]
    third_party: tuple[str, ...]
    extras: dict[str, list[str]]

    @property
    def name(self) -> str:
        """The name of its folder, which is what people call it."""
        return self.folder.name

    @property
    def init_file(self) -> Path:
        """The file that holds its version."""
        return self.folder / "src" / self.import_name / "__init__.py"


def read_projects() -> dict[str, Project]:
    """Read all pyprojects; the result is ordered so that a package follows what it depends on."""
    tables = {}
    for file in sorted(ROOT.glob("packages/*/pyproject.toml")):
        tables[file.parent] = tomllib.loads(file.read_text(encoding="utf-8"))
    folder_of = {canonicalize_name(t["project"]["name"]): f.name for f, t in tables.items()}
    projects = {}
    for folder, table in tables.items():
        local, third_party = [], []
        for text in table["project"]["dependencies"]:
            owner = folder_of.get(canonicalize_name(Requirement(text).name))
            if owner:
                local.append(owner)
            else:
                third_party.append(text)
        projects[folder.name] = Project(
            folder=folder,
            dist=table["project"]["name"],
            import_name=Path(table["tool"]["hatch"]["version"]["path"]).parent.name,
            local=tuple(local),
            third_party=tuple(third_party),
            extras=table["project"].get("optional-dependencies", {}),
        )
    return {name: projects[name] for name in _bottom_up(projects, projects)}


def _bottom_up(names: Iterable[str], projects: dict[str, Project]) -> list[str]:
    ordered: list[str] = []

    def visit(name: str) -> None:
        for below in projects[name].local:
            visit(below)
        if name not in ordered:
            ordered.append(name)

    for name in names:
        visit(name)
    return ordered


PROJECTS = read_projects()
PACKAGES = list(PROJECTS)
EACH_PACKAGE = nox.parametrize("package", [nox.param(name, id=name) for name in PACKAGES])


def closure(names: Iterable[str]) -> list[Project]:
    """Return the named packages and every local package below them, lowest first."""
    return [PROJECTS[name] for name in _bottom_up(names, PROJECTS)]


# ---------------------------------------------------------------------------------- environments


def install(
    session: nox.Session,
    names: Sequence[str],
    *,
    extras: Sequence[str] = (),
    tools: Sequence[str] = (),
    triton: bool = False,
    torchrec: bool = False,
) -> None:
    """Install packages of ours with what they declare.

    Args:
        session: the session whose environment is filled.
        names: folders of the packages; what they need of ours comes along.
        extras: extras of the named packages (not of those below them).
        tools: further requirements, pinned by the constraints.
        triton: add triton where torch came without.
        torchrec: add torchrec with the CPU build of fbgemm, where a named package has that extra.
    """
    projects = closure(names)
    wanted = [text for project in projects for text in project.third_party]
    wanted += [text for name in names for extra in extras for text in PROJECTS[name].extras[extra]]
    if torchrec:
        wanted += [text for name in names for text in PROJECTS[name].extras.get("torchrec", [])]
    install_third_party(session, [*wanted, *tools, "hatchling"], triton=triton)
    session.install(
        "--no-build-isolation", "--no-deps", "--force-reinstall", *map(relative, projects)
    )
    session.run("python", "-m", "pip", "check", silent=True)


def install_third_party(
    session: nox.Session, requirements: Iterable[str], *, triton: bool = False
) -> None:
    """Install other people's packages, unless nothing has changed since the last time."""
    wanted = sorted(set(requirements))
    stamp = environment(session) / STAMP
    pyprojects = sorted(ROOT.glob("packages/*/pyproject.toml"))
    parts = [sys.version, *wanted, TRITON * triton]
    files = [CONSTRAINTS, *pyprojects]
    constraints = ["--constraint", str(CONSTRAINTS)]
    shim: list[str] = []
    if any(Requirement(text).name == "torchrec" for text in wanted):
        files += [TORCHREC_CONSTRAINTS, TORCHREC_SHIM / "pyproject.toml"]
        constraints += ["--constraint", str(TORCHREC_CONSTRAINTS)]
        shim = [str(TORCHREC_SHIM)]
    parts += [file.read_text(encoding="utf-8") for file in files]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    if stamp.exists() and json.loads(stamp.read_text(encoding="utf-8"))["key"] == key:
        return
    stamp.unlink(missing_ok=True)
    shared = share_from_other_environments(session, [*wanted, *[TRITON] * triton])
    session.log(f"installing {len(wanted)} requirements; {len(shared)} packages came from others")
    silent = not shows_progress(session, wanted)
    session.install(*constraints, *wanted, *shim, silent=silent)
    if triton and str(session.run("python", "-c", ASK_TORCH, silent=True)).strip() == "lacks":
        session.install(TRITON)
    stamp.write_text(json.dumps({"key": key}), encoding="utf-8")


def environment(session: nox.Session) -> Path:
    """Return the folder of the session's environment."""
    return Path(session.bin).parent


def site_packages(session: nox.Session) -> Path:
    """Return the folder into which pip installs in this session."""
    return next(environment(session).glob("lib/python3*/site-packages"))


def shows_progress(session: nox.Session, requirements: Iterable[str]) -> bool:
    """Tell whether torch is still to come: a long download, which a person should see moving."""
    names = {Requirement(text).name for text in requirements}
    return "torch" in names and not list(site_packages(session).glob("torch-*.dist-info"))


def relative(project: Project) -> str:
    """Return the folder of a package in the form that pip takes for a path."""
    return f"./{project.folder.relative_to(ROOT).as_posix()}"


def share_from_other_environments(session: nox.Session, requirements: Iterable[str]) -> set[str]:
    """Hard-link the required packages, and what they require, from finished sessions.

    A torch is 0.8 to 6 GB and each package has environments of its own; this way the disk holds it
    once, and only the first session waits for it. pip runs afterwards as if it had installed them
    itself: what is missing or does not fit the constraints, it replaces. Neither pip nor Python
    writes into an installed file in place, so one environment cannot change another.

    Returns:
        the canonical names of the packages that were linked.
    """
    site = site_packages(session)
    present = {canonicalize_name(d.name) for d in metadata.distributions(path=[str(site)])}
    found = dict(_offers(site, environment(session).parent))
    linked: set[str] = set()
    seen: set[tuple[str, str]] = set()
    open_requirements = [Requirement(text) for text in requirements]
    while open_requirements:
        requirement = open_requirements.pop()
        name = canonicalize_name(requirement.name)
        dist, donor = found.get(name, (None, site))
        if dist is None or not requirement.specifier.contains(dist.version, prereleases=True):
            continue
        if name not in present and name not in linked:
            _link(dist, donor, site)
            linked.add(name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for needed in map(Requirement, dist.requires or ()):
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    open_requirements.append(needed)
    return linked


def _offers(
    site: Path, environments: Path
) -> Iterator[tuple[str, tuple[metadata.Distribution, Path]]]:
    """Yield what finished environments of the same Python hold, unless constraints exclude it."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pinned = {canonicalize_name(pin.name): pin.specifier for pin in pins}
    for stamp in sorted(environments.glob(f"*/{STAMP}")):
        donor = stamp.parent / site.relative_to(site.parents[2])
        if donor == site:
            continue
        for dist in metadata.distributions(path=[str(donor)]):
            name = canonicalize_name(dist.name)
            if name not in pinned or pinned[name].contains(dist.version, prereleases=True):
                yield name, (dist, donor)


def _link(dist: metadata.Distribution, donor: Path, site: Path) -> None:
    # pip takes a package for installed once its metadata folder is there: that comes last.
    files = sorted(dist.files or (), key=lambda file: file.parts[0].endswith(".dist-info"))
    for file in files:
        source, target = donor / file, site / file
        if target.exists() or not source.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.parts[0] == "..":  # a script names the interpreter of its environment
            old, new = str(donor.parents[2]).encode(), str(site.parents[2]).encode()
            target.write_bytes(source.read_bytes().replace(old, new))
            shutil.copymode(source, target)
            continue
        try:
            os.link(source, target)
        except OSError:  # a file system without hard links: costs disk, but no download
            shutil.copy2(source, target)


def run_environment() -> dict[str, str]:
    """Return what every session sets: raw data files are fetched once for all of them."""
    return {"GEM_DOWNLOADS": str(ROOT / "runs" / "data" / "downloads")}


# ---------------------------------------------------------------------------------- what people run


@nox.session
def demo(session: nox.Session) -> None:
    """Fetch data, train, evaluate: ``nox -s demo [-- RECIPE [--set key=value ...]]``."""
    rest = list(session.posargs)
    recipe = rest.pop(0) if rest and not rest[0].startswith("-") else "ml100k-time"
    install(session, ["gem"])
    number = 1
    while (ROOT / "runs" / f"demo-{Path(recipe).stem}-{number}").exists():
        number += 1
    run = f"runs/demo-{Path(recipe).stem}-{number}"
    env = run_environment()
    # After Ctrl-C a run finishes its step and writes a checkpoint; nox must wait for that.
    train = ("python", "-m", "gem", "train", recipe, "--out", run, *rest)
    session.run(*train, env=env, interrupt_timeout=60)
    session.log("evaluating the checkpoint on disk, as anybody can who has the run's folder")
    session.run("python", "-m", "gem", "eval", run, env=env)


# ---------------------------------------------------------------------------------- checks


@nox.session
@nox.parametrize("package", [nox.param(name, id=name) for name in [*PACKAGES, "repo"]])
def test(session: nox.Session, package: str) -> None:
    """Test a package with its declared dependencies alone; ``repo`` tests the repository."""
    if package == "repo":
        install(session, PACKAGES, extras=["test"], triton=True)
        folder = "tests"
    else:
        # fbgemm has builds for Linux alone; elsewhere the tests that need it are left out.
        sharded = sys.platform == "linux"
        install(session, [package], extras=["test"], triton=True, torchrec=sharded)
        folder = f"packages/{package}/tests"
    workers = min(cores_here(), MOST_TEST_WORKERS)
    # Each worker's torch takes its share of the cores.
    threads = os.environ.get("OMP_NUM_THREADS", str(cores_here() // workers))
    # Arguments of the caller come behind ours: with -n 0 one process tests.
    arguments = ["-n", str(workers), "--dist", "worksteal", *session.posargs]
    pytest(session, folder, "not gpu and not gpu2", arguments, OMP_NUM_THREADS=threads)


def cores_here() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@nox.session
@EACH_PACKAGE
def gpu(session: nox.Session, package: str) -> None:
    """Run the tests that need a GPU; there a skip is a failure."""
    install(session, [package], extras=["test"], triton=True)
    markers = "gpu or gpu2" if gpus_of(session) > 1 else "gpu and not gpu2"
    pytest(session, f"packages/{package}/tests", markers, session.posargs, GEM_REQUIRE_GPU="1")


@nox.session
@EACH_PACKAGE
def sanitize(session: nox.Session, package: str) -> None:
    """Repeat a package's small runs of kernels under compute-sanitizer, which comes with CUDA."""
    files = (PROJECTS[package].folder / "tests").glob("test_*.py")
    if not any("mark.memcheck" in file.read_text(encoding="utf-8") for file in files):
        session.skip(f"packages/{package} has no tests marked memcheck")
    install(session, [package], extras=["test"], triton=True)
    gpus_of(session)
    report = Path(session.create_tmp()) / "racecheck.txt"
    for options in (
        ("memcheck", "--error-exitcode", "1"),
        ("racecheck", "--log-file", str(report)),
    ):
        session.run(
            *("compute-sanitizer", "--target-processes", "application-only", "--tool", *options),
            # It is slow and may be cut short: -v says of each test that it has ended.
            *("python", "-m", "pytest", "-v", "-p", "gem_opkit.testing", "-m", "memcheck and gpu"),
            *(*session.posargs, f"packages/{package}/tests"),
            # Blocks of one large allocation would hide an access outside of them.
            env={
                **run_environment(),
                "GEM_REQUIRE_GPU": "1",
                "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
            },
            external=True,
        )
    # racecheck also reports the code by which a compiler sends warps to their branches.
    session.run("python", "-m", "gem_opkit.sanitizer", str(report))


def gpus_of(session: nox.Session) -> int:
    """Return how many GPUs torch sees in the session's environment, at least one."""
    devices = session.run(
        "python", "-c", "import torch; print(torch.cuda.device_count())", silent=True
    )
    if int(str(devices)) == 0:
        session.error("no CUDA device is visible to torch; see README.md for its CUDA build")
    return int(str(devices))


def pytest(
    session: nox.Session, folder: str, markers: str, arguments: Sequence[str], **env: str
) -> None:
    """Run pytest with the plugin of opkit, which registers the markers."""
    command = ("python", "-m", "pytest", "-p", "gem_opkit.testing", "-m", markers)
    session.run(*command, *arguments, folder, env={**run_environment(), **env})


@nox.session
@EACH_PACKAGE
def bench(session: nox.Session, package: str) -> None:
    """Run a package's benchmarks; arguments after ``--`` go to each of them."""
    install(session, [package], extras=["test"], triton=True)
    files = sorted((PROJECTS[package].folder / "benchmarks").glob("bench_*.py"))
    # It needs environments of its own, which its session makes.
    files = [file for file in files if file.name != "bench_peers.py"]
    if not files:
        session.skip(f"packages/{package} has no benchmarks")
    failed = []
    for file in files:
        # What one script cannot measure must not cost the rows of the others.
        try:
            session.run("python", str(file), *session.posargs, env=run_environment())
        except CommandFailed:
            failed.append(file.name)
    if failed:
        session.error(f"not all measured: {', '.join(failed)}")


PEERS_FOLDER = ROOT / "packages" / "gem" / "benchmarks" / "peers"
PEERS = sorted(file.stem for file in PEERS_FOLDER.glob("*.txt"))


@nox.session
@nox.parametrize("part", [nox.param(name, id=name) for name in [*PEERS, "table"]])
def peers(session: nox.Session, part: str) -> None:
    """Train other people's models on our inputs: ``nox -s peers [-- --protocol NAME ...]``.

    Every part but the last makes the environment of a peer; the last trains and compares.
    """
    if part == "table":
        install(session, ["gem"])
        script = PEERS_FOLDER.parent / "bench_peers.py"
        folder = environment(session).parent
        arguments = ["--environments", str(folder), *session.posargs]
        session.run("python", str(script), *arguments, env=run_environment())
        return
    lines = (PEERS_FOLDER / f"{part}.txt").read_text(encoding="utf-8").splitlines()
    install_third_party(session, [line for line in lines if not line.startswith("#")])


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, format and the direction of imports."""
    install_third_party(session, ["ruff", "import-linter"])
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    sources = os.pathsep.join(str(p.folder / "src") for p in PROJECTS.values())
    session.run("lint-imports", "--no-logo", env={"PYTHONPATH": sources})


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of all packages against their installed dependencies."""
    install(session, PACKAGES, extras=["test"], tools=["basedpyright", "nox"], triton=True)
    session.run("basedpyright", "--pythonpath", str(Path(session.bin) / "python"))


@nox.session
def docs(session: nox.Session) -> None:
    """Render docs/ into site/."""
    install_third_party(session, ["mkdocs"])
    session.run("mkdocs", "build", "--strict")


# ---------------------------------------------------------------------------------- wheels


@nox.session
@EACH_PACKAGE
def build(session: nox.Session, package: str) -> None:
    """Install a package's wheels alone, use it, and prove that nothing else of ours is there."""
    projects = closure([package])
    wheels = Path(session.create_tmp()) / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    flags = ["--no-build-isolation", "--no-deps", "--quiet", "--wheel-dir", str(wheels)]
    folders = map(relative, projects)
    session.run(builder(session), "-m", "pip", "wheel", *flags, *folders, external=True)

    for installed in metadata.distributions(path=[str(site_packages(session))]):
        if installed.name in [project.dist for project in PROJECTS.values()]:
            session.run("python", "-m", "pip", "uninstall", "--yes", installed.name, silent=True)
    wanted = [text for project in projects for text in project.third_party]
    share_from_other_environments(session, wanted)
    # Here pip reads what is needed from the wheels themselves.
    files = sorted(map(str, wheels.glob("*.whl")))
    silent = not shows_progress(session, wanted)
    session.install("--constraint", str(CONSTRAINTS), *files, silent=silent)
    (environment(session) / STAMP).write_text("{}", encoding="utf-8")
    session.run("python", "-m", "pip", "check", silent=True)

    others = [p.import_name for p in PROJECTS.values() if p not in projects]
    ours = [project.import_name for project in projects]
    session.run("python", "-I", "tools/check_wheels.py", "--ours", *ours, "--others", *others)
    session.run("python", "-I", f"packages/{package}/tests/smoke.py")


def builder(session: nox.Session) -> str:
    """Return a Python that can build wheels, kept apart from the environments that use them."""
    home = Path(session.cache_dir).resolve() / "wheel-builder"
    python = home / "bin" / "python"
    key = hashlib.sha256(sys.version.encode() + CONSTRAINTS.read_bytes()).hexdigest()
    stamp = home / STAMP
    if not stamp.exists() or json.loads(stamp.read_text(encoding="utf-8"))["key"] != key:
        session.run(sys.executable, "-m", "venv", "--clear", str(home), external=True)
        arguments = ["--quiet", "--constraint", str(CONSTRAINTS), "hatchling"]
        session.run(str(python), "-m", "pip", "install", *arguments, external=True)
        stamp.write_text(json.dumps({"key": key}), encoding="utf-8")
    return str(python)


@nox.session(venv_backend="none")
@EACH_PACKAGE
def release(session: nox.Session, package: str) -> None:
    """Write wheel and source archive to dist/, if version, changelog and tag agree."""
    project = PROJECTS[package]
    version = first_match(r'__version__ = "(.+)"', project.init_file)
    newest = first_match(r"## \[(\d.*?)\]", project.folder / "CHANGELOG.md")
    if newest != version:
        session.error(f"{package} has version {version}, but its changelog begins with {newest}")
    tag = f"{package}-v{version}"
    tags = session.run("git", "tag", "--points-at", "HEAD", external=True, silent=True)
    if tag not in str(tags).split():
        session.error(f"HEAD must carry the tag {tag}; set it with: git tag {tag}")
    python = builder(session)
    with session.chdir(project.folder):
        session.run(python, "-m", "hatchling", "build", "-d", str(ROOT / "dist"), external=True)


def first_match(pattern: str, file: Path) -> str:
    """Return the first group of the first match in a file, or say that there is none."""
    match = re.search(pattern, file.read_text(encoding="utf-8"))
    return match[1] if match else "nothing"
