"""Reports of racecheck: what is known to be no race, and what is a race of ours."""

import sys

import pytest

from gem_opkit.errors import ConfigError
from gem_opkit.sanitizer import is_dispatch, is_handing_over, main, races_in

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


# As compute-sanitizer wrote it for a kernel that hands numbers over; the lines are those of HOME.
HANDING = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at forward_kernel+0x790 in device.py:5
=========     and Write access at forward_kernel+0x50b0 in device.py:2 [32 hazards]
=========     and Write access at forward_kernel+0x50f0 in device.py:2 [32 hazards]
========= \n"""
HOME = """\
def tell(smem, place, number):
    smem.index(place).store(number)

def told(smem, place):
    return gl.sum(smem.index(place).load(ONE), 0)
"""
USERS = """\
from pack.device import tell, told

def produce(turn):
    for part in range(2):
        mbarrier.wait(empty.index(part), turn)
        number = 1
        tell(smem, part, number)
        load_rows(desc, full.index(part))

def consume(turn):
    if turn:
        mbarrier.wait(full.index(0), turn)
        number = told(smem, 0)
        other = told(smem, 1)
        mbarrier.arrive(empty.index(0))
"""


@pytest.fixture
def pack(tmp_path):
    def write(users, *, beside="def other():\n    x = gl.load(p)\n"):
        for folder, name, text in (
            ("pack", "device", HOME),
            ("pack", "kernel", users),
            ("beside", "device", beside),
            # Other things go by these names.
            ("beside", "file", "def end(file):\n    told(file)\n    return file.tell()\n"),
        ):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / f"{name}.py").write_text(text)
        return sorted(tmp_path.rglob("*.py"))

    return write


def test_numbers_handed_over_are_told_apart(pack):
    (race,) = races_in(HANDING + SUMMARY)
    assert is_handing_over(race, pack(USERS))
    assert not is_handing_over(race, [])
    assert not is_dispatch(race, pack(USERS))


@pytest.mark.parametrize(
    ("there", "instead"),
    [
        (":5\n", ":1\n"),  # a read elsewhere
        (":5\n", ":2\n"),
        ("0x50f0 in device.py:2", "0x50f0 in device.py:5"),  # a write elsewhere
        ("0x50f0 in device.py:2", "0x50f0 in kernel.py:2"),
        (
            "Read access at forward_kernel+0x790 in device.py:5",
            "Write access at k+0x0 in device.py:2",
        ),
        ("Read access at forward_kernel", "Read access at backward_kernel"),
        ("in device.py:5", ""),
    ],
)
def test_a_race_with_anything_else_is_not(pack, there, instead):
    assert there in HANDING
    (race,) = races_in(HANDING.replace(there, instead) + SUMMARY)
    assert not is_handing_over(race, pack(USERS))


@pytest.mark.parametrize(
    ("there", "instead"),
    [
        ("mbarrier.wait(empty.index(part), turn)", "pass"),
        ("mbarrier.wait(full.index(0), turn)", "pass"),
        ("wait(empty", "wait(full"),
        ("wait(full", "wait(empty"),
        ("number = 1", "mbarrier.arrive(full.index(part))"),
        ("        load_rows(desc, full.index(part))\n", ""),
        ("load_rows(desc, full", "load_rows(desc, empty"),
        ("other = told(smem, 1)", "other = 1 + told(smem, 1)"),
        ("other = told(smem, 1)", "return told(smem, 1)"),
        (
            "mbarrier.arrive(empty.index(0))",
            "mbarrier.arrive(empty.index(0))\n        x = told(smem, 0)",
        ),
        (
            "tell(smem, part, number)",
            "device.tell(smem, part, number)\n        tell(smem, part, 2)",
        ),
        ("tell, told\n", "tell as put, told\n\nput(smem, 0, 1)\n"),
    ],
)
def test_numbers_handed_over_in_another_order_are_not(pack, there, instead):
    assert there in USERS
    (race,) = races_in(HANDING + SUMMARY)
    assert not is_handing_over(race, pack(USERS.replace(there, instead)))


def test_a_line_that_two_files_of_a_name_have_is_not_enough(pack):
    (race,) = races_in(HANDING + SUMMARY)
    assert not is_handing_over(race, pack(USERS, beside="def other():\n    tile.store(1)\n"))


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


def test_command_line_counts_both_kinds(sources, pack, tmp_path, monkeypatch, capsys):
    pack(USERS)
    report = tmp_path / "report.txt"
    report.write_text(DISPATCH + HANDING + HANDING.replace(":5\n", ":1\n") + SUMMARY)
    monkeypatch.setattr(sys, "argv", ["", str(report), "--sources", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2
    assert "device.py:1;" in said[0]
    assert said[1] == "1 races; 1 more are the dispatch of warps, 1 numbers handed over"
