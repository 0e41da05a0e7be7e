"""Who computes: the whole table of words and devices, the log, and Dynamo."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import gem_opkit.impl
from gem_opkit.errors import UnsupportedError
from gem_opkit.impl import auto_means, resolve_impl
from gem_opkit.testing import check_refuses

CPU, CUDA, META = (torch.device(name) for name in ("cpu", "cuda", "meta"))


@pytest.mark.parametrize(
    ("impl", "device", "has_triton", "interpret", "chosen"),
    [
        ("auto", CPU, True, "0", "reference"),
        ("auto", CPU, True, "1", "reference"),  # the interpreter is for tests, never for auto
        ("auto", CPU, False, "0", "reference"),
        ("auto", CUDA, True, "0", "triton"),
        ("auto", CUDA, False, "0", "reference"),
        ("auto", META, True, "0", "reference"),
        ("reference", CPU, True, "0", "reference"),
        ("reference", CUDA, True, "0", "reference"),
        ("reference", torch.device("mps"), True, "0", "reference"),
        ("triton", CUDA, True, "0", "triton"),
        ("triton", META, True, "0", "triton"),
        ("triton", CPU, True, "1", "triton"),
    ],
)
def test_choice(monkeypatch, impl, device, has_triton, interpret, chosen):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    assert resolve_impl(impl, device, "op", has_triton=has_triton) == chosen


def test_refusals(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def row(impl, device, has_triton, pattern):
        def call():
            resolve_impl(impl, torch.device(device), "jagged_mean", has_triton=has_triton)

        return call, UnsupportedError, pattern

    check_refuses(
        [
            row("triton", "cpu", True, 'on a CPU needs TRITON_INTERPRET=1.*impl="reference"'),
            row("triton", "cuda", False, 'jagged_mean has none yet; use impl="reference"'),
            row("triton", "cpu", False, "needs a Triton kernel"),
            row("triton", "mps", True, "on 'mps'"),
            row("cutlass", "cuda", True, "one of auto, reference, triton; got 'cutlass'"),
        ]
    )


def test_choice_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(gem_opkit.impl, "_announced", set())
    with caplog.at_level(logging.INFO, logger="gem_opkit.impl"):
        for _ in range(3):
            resolve_impl("auto", CUDA, "mean", has_triton=True)
        resolve_impl("auto", CPU, "mean", has_triton=True)
    assert [record.getMessage() for record in caplog.records] == [
        "mean: impl='auto' on cuda runs triton",
        "mean: impl='auto' on cpu runs reference",
    ]


def test_choice_inside_a_full_graph_is_made_and_logged(monkeypatch, caplog):
    monkeypatch.setattr(gem_opkit.impl, "_announced", set())

    def doubled(x_T, impl):
        factor = {"reference": 2, "triton": 3}
        return x_T * factor[resolve_impl(impl, x_T.device, "doubled", has_triton=True)]

    torch._dynamo.reset()
    whole = torch.compile(doubled, fullgraph=True, dynamic=True, backend="eager")
    with caplog.at_level(logging.INFO, logger="gem_opkit.impl"):
        assert float(whole(torch.ones(2), "auto")[0]) == 2
    assert "doubled: impl='auto' on cpu runs reference" in caplog.text
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert float(whole(torch.ones(2), "triton")[0]) == 3
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="needs TRITON_INTERPRET=1"):
        whole(torch.ones(2), "triton")


def test_auto_can_mean_the_reference_on_every_thread(monkeypatch):
    def chosen(impl):
        return resolve_impl(impl, CUDA, "op", has_triton=True)

    with auto_means("reference"):
        with ThreadPoolExecutor(1) as other:
            assert other.submit(chosen, "auto").result() == chosen("auto") == "reference"
        assert chosen("triton") == "triton"  # who asks by name gets it
        with pytest.raises(ZeroDivisionError), auto_means("auto"):
            assert chosen("auto") == "triton"
            raise ZeroDivisionError
        assert chosen("auto") == "reference"
    assert chosen("auto") == "triton"
    with pytest.raises(UnsupportedError, match="auto_means: impl must be one of"):  # noqa: SIM117
        with auto_means("cuda"):
            pass
