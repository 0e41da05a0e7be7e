"""`gem doctor` on sound, strange and broken installations."""

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from gem.doctor import examine as examining
from gem.doctor import packages as parts
from gem.doctor.devices import Device, resource_problems
from gem.doctor.examine import examine
from gem.doctor.formats import FORMATS, cpu_formats, cuda_formats, format_findings
from gem.doctor.kernels import operator_findings
from gem.doctor.packages import PARTS, Package
from gem.doctor.page import page
from gem_embeddings.torchrec_engine.versions import fit_of


@pytest.fixture(scope="module")
def threads():
    return torch.get_num_threads()  # by default: every single test sets a number of its own


@pytest.fixture(scope="module")
def found(threads):
    return examine()


def shown(found, width=100):
    console = Console(file=io.StringIO(), width=width)
    console.print(page(found))
    return console.file.getvalue()


def command(*words, fakes=None):
    paths = [*([str(fakes)] if fakes else []), *sys.path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    run = [sys.executable, "-m", "gem", "doctor", *words]
    return subprocess.run(run, env=env, capture_output=True, text=True, check=False)


def make_module(folder, name, source, version=None):
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "__init__.py").write_text(source)
    if version is not None:
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_a_sound_installation(found, threads):
    assert found.problems == []
    assert found.packages["torch"].version == torch.__version__
    assert found.packages["gem_attention"].version is not None
    assert {part.state for name, part in found.packages.items() if PARTS[name].needed} == {"loads"}
    # Everything that is declared is looked for.
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    declared = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}
    assert declared <= {name for part in PARTS.values() for name in part.distributions}
    cpu = found.devices["cpu"]
    assert (cpu.kind, cpu.capability) == ("cpu", None)
    assert cpu.memory_bytes > 2**30
    assert 0 < cpu.cores <= os.cpu_count()
    assert cpu.threads == threads
    assert len(found.devices) == 1 + torch.cuda.device_count()
    assert found.disk.free_bytes > 0


def test_the_command_prints_it_for_a_person_and_for_a_script(found):
    done = command("--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    wanted = json.loads(json.dumps(asdict(found)))
    for key in ("packages", "operators", "formats", "torchrec", "triton", "notes"):
        assert said[key] == wanted[key], key
    text = shown(found)
    assert "all there: gem train synthetic-debug will run" in text
    assert "sharded tables, extra gem-embeddings[torchrec]" in text
    assert all(len(line.rstrip()) <= 80 for line in shown(found, width=80).splitlines())


def test_every_operator_of_every_package_is_found(found):
    """By the folders on disk, whichever there are."""
    folders = {}
    for package in ("gem_attention", "gem_embeddings", "gem_jagged", "gem_precision"):
        [place] = importlib.util.find_spec(package).submodule_search_locations
        folders |= {op.parent.name: package for op in Path(place).glob("kernels/*/op.py")}
    assert {name: operator.package for name, operator in found.operators.items()} == folders
    for name, operator in found.operators.items():
        choice = operator.devices["cpu"]
        assert (choice.impl, choice.kernel) == ("reference", "reference"), name
        assert name in shown(found)


def test_what_runs_on_a_gpu_is_what_the_operator_says(tmp_path, monkeypatch):
    operators = tmp_path / "gem_fake" / "kernels"
    for name, source, files in (
        ("plain", "_HAS_TRITON = False", ["op.py"]),
        ("kernel", "_HAS_TRITON = True", ["op.py", "kernel.py"]),
        ("hopper", "_HAS_TRITON = True  # sm90", ["op.py", "kernel.py", "kernel_sm90.py"]),
        ("unused", "_HAS_TRITON = True", ["op.py", "kernel.py", "kernel_sm100.py"]),
        ("broken", "raise SystemExit(3)", ["op.py"]),
    ):
        for file in ("__init__.py", *files):
            path = operators / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            # A kernel that is imported would be seen.
            path.write_text(
                source if file == "op.py" else "raise AssertionError" * (file[0] == "k")
            )
    (operators / "__init__.py").touch()
    (operators.parent / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    devices = {"cpu": None, "cuda:0": (9, 0), "cuda:1": (8, 0)}
    found = operator_findings(devices, triton_fault=None)
    mine = {name: f for name, f in found.items() if f.package == "gem_fake"}
    assert {name: [c.kernel for c in f.devices.values()] for name, f in mine.items()} == {
        "broken": ["none", "none", "none"],
        "hopper": ["reference", "triton sm90", "triton"],
        "kernel": ["reference", "triton", "triton"],
        "plain": ["reference", "reference", "reference"],
        "unused": ["reference", "triton", "triton"],
    }
    assert mine["hopper"].has == ["reference", "triton", "triton sm90"]
    assert mine["broken"].devices["cpu"].why == "does not load: SystemExit: 3"
    without = operator_findings(devices, triton_fault="it is not installed")["kernel"]
    assert [c.kernel for c in without.devices.values()] == ["reference", "none", "none"]
    assert without.devices["cuda:0"].why == "its kernel needs Triton, and it is not installed"


@pytest.mark.parametrize(
    ("capability", "cuda", "native"),
    [
        ((7, 0), (12, 8), "fp32 fp16"),
        ((7, 5), (13, 0), "fp32 fp16"),
        ((8, 0), (13, 0), "fp32 tf32 bf16 fp16"),
        ((8, 6), (13, 0), "fp32 tf32 bf16 fp16"),
        ((8, 9), (13, 0), "fp32 tf32 bf16 fp16 fp8_e4m3 fp8_e5m2"),
        ((9, 0), (13, 0), "fp32 tf32 bf16 fp16 fp8_e4m3 fp8_e5m2 fp8_block"),
        ((9, 0), (12, 8), "fp32 tf32 bf16 fp16 fp8_e4m3 fp8_e5m2"),
        ((10, 0), (13, 0), "fp32 tf32 bf16 fp16 fp8_e4m3 fp8_e5m2 mxfp8"),
        ((10, 0), (12, 6), "fp32 tf32 bf16 fp16 fp8_e4m3 fp8_e5m2"),
        ((12, 0), (13, 0), "fp32 tf32 bf16 fp16 fp8_e4m3 fp8_e5m2 mxfp8"),
        ((12, 0), (12, 9), "fp32 tf32 bf16 fp16 fp8_e4m3 fp8_e5m2"),
    ],
)
def test_formats_of_gpus(capability, cuda, native):
    found = cuda_formats(capability, cuda, (2, 13))
    assert list(found) == list(FORMATS)
    assert {name for name, state in found.items() if state.state == "native"} == set(native.split())
    assert all(state.why for state in found.values())
    assert (found["tf32"].state == "absent") == (capability < (8, 0))


def test_formats_of_cpus():
    assert cpu_formats(None)["bf16"].state == "unknown"
    assert cpu_formats([])["bf16"].state == "emulated"
    assert cpu_formats(["fpu", "AVX512_BF16"])["bf16"].state == "native"
    assert cpu_formats(["amx_fp16"])["fp16"].state == "native"
    # Arm: as torch names the features, and as Linux does.
    for flags in (["neon", "bf16", "fp16_arith"], ["asimd", "bf16", "asimdhp"]):
        assert {cpu_formats(flags)[name].state for name in ("bf16", "fp16")} == {"native"}
    assert cpu_formats([])["tf32"].state == "absent"


def test_a_recipe_may_ask_for_what_is_built():
    found = format_findings({"cpu": cpu_formats([])})
    built = {name: f.recipe for name, f in found.items() if f.built}
    assert built == {
        "fp32": "fp32",
        "bf16": "bf16_autocast",
        "fp8_block": "fp8_block",
        "mxfp8": "mxfp8_rceil",
    }
    assert found["tf32"].recipe is None


def test_a_gpu_has_its_column_and_lacks_triton(found, monkeypatch):
    kinds = {"cpu": None, "cuda:0": (9, 0)}
    gpu = Device("cuda", "NVIDIA H200", (9, 0), 141 * 2**30)
    states = {"cpu": cpu_formats([]), "cuda:0": cuda_formats((9, 0), (13, 0), (2, 13))}
    both = replace(
        found,
        devices={**found.devices, "cuda:0": gpu},
        operators=operator_findings(kinds, triton_fault=None),
        formats=format_findings(states),
    )
    text = shown(both)
    assert "NVIDIA H200" in text and "compute capability 9.0" in text
    assert "jagged_mean" in text and "a GPU, and it has a Triton kernel" in text
    assert "cuda:0, mxfp8: needs compute capability 10.0, this is 9.0" in text
    # Equal GPUs share a column.
    eight = replace(both, devices=both.devices | {f"cuda:{i}": gpu for i in range(8)})
    assert "on cuda:0 and 7 more" in shown(eight)
    assert shown(eight).count("on cuda") == 2
    # And where such a machine has no Triton:
    monkeypatch.setattr(examining, "find_devices", lambda *_: (both.devices, states))
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "triton" else there(name, *a)
    )
    [problem] = examine().problems
    assert problem.startswith("there is a GPU, and its kernels need triton (it is not installed)")


def test_it_says_what_is_missing_and_what_to_do(monkeypatch):
    there = importlib.util.find_spec
    missing = {"pyarrow", "torchrec", "fbgemm_gpu", "gem_jagged"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name in missing else there(name, *a)
    )
    arrow, jagged = examine().problems  # torchrec is optional
    assert arrow == "pyarrow is not installed (needed for data sets); pip install pyarrow"
    assert jagged.endswith("install ./packages/jagged as the README of gem-trainer says")


def test_it_answers_although_everything_is_broken(tmp_path):
    """Modules that raise when they are imported, as a wrong build does; one exits."""
    faults = {
        "torch": "raise OSError('libtorch_cuda.so: cannot open shared object file')",
        "triton": "raise ImportError('libtriton.so: undefined symbol')",
        "numpy": "raise ImportError('numpy.core.multiarray\\nfailed to import')",
        "pyarrow": "import sys; sys.exit('wrong glibc')",
        "tensorboard": "raise RuntimeError",
        "gem_parallel": "1 / 0",
        "torchrec": "",
        "fbgemm_gpu": "raise OSError('Could not load this library: undefined symbol: _ZN3c10')",
    }
    for name, source in faults.items():
        make_module(tmp_path, name, source)
    done = command("--json", fakes=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    found = json.loads(done.stdout)
    for name in ("torch", "triton", "numpy", "pyarrow", "tensorboard", "gem_parallel"):
        assert found["packages"][name]["state"] == "does not load", name
    assert found["packages"]["tensorboard"]["why"] == "RuntimeError"
    assert found["torchrec"]["state"] == "does not load"
    assert found["torchrec"]["why"].endswith("undefined symbol: _ZN3c10")
    assert list(found["devices"]) == ["cpu"]
    assert found["devices"]["cpu"]["threads"] is None
    assert found["operators"]["jagged_mean"]["devices"]["cpu"]["impl"] == "none"
    assert not any(number_format["built"] for number_format in found["formats"].values())
    said = "\n".join(found["problems"])
    assert "torch " in said and "cannot open shared object file); pip install --force-re" in said
    assert "ImportError: numpy.core.multiarray failed to import" in said
    assert all("\n" not in problem for problem in found["problems"])


@pytest.mark.parametrize(
    ("versions", "source", "state", "why"),
    [
        ("{fits}.0 1.6.1", "", "loads", ""),
        ("0.1.0 1.6.1", "", "version mismatch", "fbgemm-gpu is 0.1.0, and torch "),
        ("{fits}.0 1.5.0", "", "version mismatch", "torchrec is 1.5.0, and torch "),
        ("{fits}.0 1.6.1", "import os; os.abort()", "does not load", "the process that loads it"),
        ("{fits}.0 1.6.1", "raise OSError('no symbol')", "does not load", "OSError: no symbol"),
    ],
)
def test_torchrec_and_fbgemm_are_judged_together(
    tmp_path, monkeypatch, versions, source, state, why
):
    fit = fit_of(torch.__version__)
    assert fit is not None
    fbgemm, torchrec = versions.format(fits=fit.fbgemm).split()
    make_module(tmp_path, "torchrec", "", torchrec)
    make_module(tmp_path, "fbgemm_gpu", source, fbgemm)
    monkeypatch.syspath_prepend(tmp_path)
    packages = {name: parts.find_package(name) for name in ("torch", "torchrec", "fbgemm_gpu")}
    found = parts.find_torchrec(packages)
    assert found.state == state
    assert found.why.startswith(why)
    said = parts.torchrec_lines(found)
    assert (said == []) == (state == "loads")
    assert all(
        line.endswith("install torchrec as the README of gem-embeddings says") for line in said
    )


def test_versions_are_not_judged_where_the_tables_are_broken(monkeypatch):
    monkeypatch.setattr(parts, "loaded", lambda _: (None, "ImportError: broken"))
    assert parts._misfit("2.13.0+cpu", "0.1.0", "0.1.0") == ""


def test_an_old_torch_and_a_small_machine_are_problems(found):
    old = {**found.packages, "torch": Package("2.10.1", "loads", "", "everything")}
    assert parts.package_problems(old) == [
        "torch is 2.10.1; 2.11 or newer is needed: pip install -U torch"
    ]
    assert parts.package_problems(found.packages) == []
    small = replace(found.devices["cpu"], memory_bytes=2**30)
    disk = replace(found.disk, free_bytes=2**20, writable=False)
    lines = resource_problems(small, disk)
    assert [line.split(" of ")[0] for line in lines[:1]] == ["this machine has 1.0 GiB"]
    assert "0.0 GiB are free" in lines[1] and "is not writable" in lines[2]


def test_the_disk_is_that_of_the_runs(tmp_path):
    found = examine(tmp_path / "not" / "there" / "yet")
    assert found.disk.folder == str(tmp_path)
    assert found.disk.writable


def test_brackets_are_printed_as_they_are(found):
    assert "no [bold] in x[/y]" in shown(replace(found, problems=["no [bold] in x[/y]"]))
