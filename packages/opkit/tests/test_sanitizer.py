"""Reports of racecheck: what is the compiler's dispatch of warps, and what is a race of ours."""

import sys

import pytest

from gem_opkit.errors import ConfigError
from gem_opkit.sanitizer import is_dispatch, main, races_in

# As compute-sanitizer wrote it for a kernel with gl.warp_specialize; the lines are those of SOURCE.
DISPATCH = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at forward_kernel+0x100 in kernel_sm90.py:2
=========     and Write access at forward_kernel+0x63e0 in kernel_sm90.py:2 [30 hazards]
=========     and Write access at forward_kernel+0xab80 in kernel_sm90.py:6 [38 hazards]
========= \n"""
SUMMARY = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
SOURCE = """\
@gluon.jit
def forward_kernel(
    q_ptr,
):
    x = 1
    gl.warp_specialize(
        []
    )
"""


@pytest.fixture
def sources(tmp_path):
    for name, text in (("a", "def other_kernel():\n    pass\n" * 9), ("b", SOURCE)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel_sm90.py").write_text(text)
    return sorted(tmp_path.rglob("*.py"))


def test_the_dispatch_of_warps_is_told_apart(sources):
    (race,) = races_in(DISPATCH + SUMMARY)
    assert len(race.accesses) == 3
    assert is_dispatch(race, sources)
    assert not is_dispatch(race, [])


@pytest.mark.parametrize(
    ("there", "instead"),
    [
        (":6 [38", ":5 [38"),  # a line of the kernel's own
        (":6 [38", ":99 [38"),
        ("forward_kernel+0xab80", "backward_kernel+0xab80"),
        ("in kernel_sm90.py:6 ", ""),
    ],
)
def test_a_race_of_the_kernel_is_not(sources, there, instead):
    (race,) = races_in(DISPATCH.replace(there, instead) + SUMMARY)
    assert not is_dispatch(race, sources)


def test_a_choice_between_calls_is_the_call(sources):
    choice = SOURCE.replace("    gl.warp", "    if WIDE:\n        gl.warp").replace(
        "    )\n", "        )\n"
    )
    for name, text in (("only calls", choice), ("more", choice + "        x = 2\n")):
        sources[1].write_text(text)
        (race,) = races_in(DISPATCH + SUMMARY)
        assert is_dispatch(race, sources) == (name == "only calls")


def test_nothing_follows_from_a_run_that_was_cut_short():
    with pytest.raises(ConfigError, match="summary of racecheck"):
        races_in(DISPATCH)


@pytest.mark.parametrize(("line", "status", "said"), [(6, 0, "0 races; 1 more"), (5, 1, "race: ")])
def test_command_line(sources, tmp_path, monkeypatch, capsys, line, status, said):
    report = tmp_path / "report.txt"
    report.write_text(DISPATCH.replace(":6 [38", f":{line} [38") + SUMMARY)
    monkeypatch.setattr(sys, "argv", ["", str(report), "--sources", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == status
    assert said in capsys.readouterr().out
