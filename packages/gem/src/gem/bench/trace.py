"""A profiler's trace becomes pieces of work: when each ran, for which module, of which kind.

A kernel belongs to the module whose range is open where it is launched. In the backward pass no
module runs: there autograd tells the sequence number of the operator that it differentiates, and
the range in which that operator ran is the module. What no operator asked for (sums of gradients)
has no module. On a CPU operators stand in place of kernels, each without those that it calls.

Reads the JSON that `torch.profiler` exports; imports no torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gem.bench.kinds import Kind, Origin, kind_of
from gem_opkit.errors import MeasurementError, refusal

Phase = Literal["forward", "backward", "outside"]

# Names of ranges: those of a step, of a section (`gem.train.clock`), of a module.
STEP_RANGE, SECTION_RANGE, MODULE_RANGE = "gem step: ", "gem: ", "gem module: "
_EVALUATE = "autograd::engine::evaluate_function: "
_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# What runs in no section of the model, and is no part of it.
_OUTSIDE = ("data", "tables", "optimizer")


@dataclass(frozen=True, slots=True)
class Piece:
    """Work without interruption.

    Attributes:
        begin_us: when it began, microseconds on the trace's clock.
        end_us: when it ended.
        kind: what it is.
        region: qualified name of the module that it is for, ``tables``, ``optimizer`` or ``data``;
            empty where nobody knows.
        phase: of the model; ``outside`` for what is no part of it.
        name: of the kernel, copy or operator.
        first: whether it begins here; False for what goes on after an operator that it called.
    """

    begin_us: float
    end_us: float
    kind: Kind
    region: str
    phase: Phase
    name: str
    first: bool = True


@dataclass(frozen=True, slots=True)
class Traced:
    """What a trace holds.

    Attributes:
        pieces: all work of the counted steps, by begin.
        begin_us: when the counted steps begin: with the end of the step before them.
        end_us: when they end.
        steps: how many are counted.
    """

    pieces: tuple[Piece, ...]
    begin_us: float
    end_us: float
    steps: int


@dataclass(slots=True)
class _Open:
    """A range or an operator of a thread, with what it inherits."""

    begin_us: float
    end_us: float
    name: str
    is_op: bool
    origin: Origin
    sequence: tuple[int, int] | None  # of the operator that is being differentiated
    differentiates: bool


def read_trace(events: Sequence[Mapping[str, Any]]) -> Traced:
    """Find out what every kernel is for.

    Args:
        events: ``traceEvents`` of a trace with one range ``STEP_RANGE`` or more. The first step is
            not counted: the device begins it empty.

    Returns:
        the work of the other steps.

    Raises:
        MeasurementError: fewer than two steps, or none of their work.
    """
    host = [e for e in events if e.get("ph") == "X" and e.get("cat") in _HOST]
    device = [e for e in events if e.get("ph") == "X" and e.get("cat") in _DEVICE]
    steps = sorted((e["ts"], e["ts"] + e["dur"]) for e in host if e["name"].startswith(STEP_RANGE))
    threads: dict[Any, list[Mapping[str, Any]]] = {}
    for event in host:
        threads.setdefault(event["tid"], []).append(event)
    for own in threads.values():
        own.sort(key=lambda e: (e["ts"], -e["dur"]))
    main = [t for t, own in threads.items() if any(e["name"].startswith(STEP_RANGE) for e in own)]
    if len(steps) < 2 or len(main) != 1:
        raise _unfit(f"{len(steps)} steps on {len(main)} threads")
    regions = _regions_of_operators(threads, main[0])
    if device:
        pieces = _of_device(device, _launches(threads.values()), steps, regions)
    else:
        pieces = [p for own in threads.values() for p in _of_host(own, steps, regions)]
    before = [p.end_us for p, step in pieces if step == 0]
    counted = sorted((p for p, step in pieces if step > 0), key=lambda p: p.begin_us)
    if not counted or not before:
        raise _unfit("steps without work")
    begin_us, end_us = max(before), max(p.end_us for p in counted)
    if not device:  # the host itself is timed
        begin_us, end_us = steps[0][1], steps[-1][1]
    return Traced(tuple(counted), begin_us, end_us, len(steps) - 1)


def _unfit(got: str) -> MeasurementError:
    return MeasurementError(
        refusal(
            "gem bench step",
            "trace",
            must="hold two steps or more, on one thread, and their work",
            got=got,
            fix="record them with gem.bench.record",
        )
    )


def _walk(events: Iterable[Mapping[str, Any]]) -> Iterable[tuple[_Open, Mapping[str, Any]]]:
    """Every event of a thread, in order, with what is open where it begins, itself included."""
    stack: list[_Open] = []
    for event in events:
        while stack and stack[-1].end_us <= event["ts"]:
            stack.pop()
        opened = _open(event, stack[-1] if stack else None)
        yield opened, event
        stack.append(opened)


def _open(event: Mapping[str, Any], above: _Open | None) -> _Open:
    name, is_op = str(event["name"]), event["cat"] == "cpu_op"
    origin = above.origin if above else Origin()
    sequence, differentiates = (above.sequence, above.differentiates) if above else (None, False)
    if event["cat"] == "user_annotation":
        if name.startswith(MODULE_RANGE):
            origin = replace(origin, region=name.removeprefix(MODULE_RANGE))
        elif name.startswith(SECTION_RANGE):
            origin = replace(origin, section=name.removeprefix(SECTION_RANGE))
    elif is_op:
        if name.startswith(_EVALUATE):
            # A module's range from outside, or the function before it, says nothing of this one.
            origin, differentiates, sequence = Origin(section=origin.section), True, None
            if "Sequence number" in event.get("args", {}):
                args = event["args"]
                sequence = (int(args.get("Fwd thread id", 0)), int(args["Sequence number"]))
        elif "::" in name:
            own = origin.own or (name if name.startswith("gem_") else "")
            origin = replace(origin, own=own, inner=name)
    return _Open(
        begin_us=event["ts"],
        # A range that somebody forgot to end ends with what it is in.
        end_us=min(event["ts"] + event["dur"], above.end_us if above else float("inf")),
        name=name,
        is_op=is_op,
        origin=origin,
        sequence=sequence,
        differentiates=differentiates,
    )


def _regions_of_operators(
    threads: Mapping[Any, Sequence[Mapping[str, Any]]], main: Any
) -> dict[tuple[bool, int], str]:
    """(ran on the main thread, sequence number) -> module of the operator that has a derivative.

    Operators without one carry the number of the next that has: the last one is it.
    """
    found: dict[tuple[bool, int], str] = {}
    for thread, events in threads.items():
        for opened, event in _walk(events):
            number = event.get("args", {}).get("Sequence number")
            if opened.is_op and number is not None and not opened.name.startswith(_EVALUATE):
                outside = opened.differentiates and not opened.origin.region
                if not outside:  # a part that is computed again has its module's range
                    origin = opened.origin
                    region = origin.section if origin.section == "tables" else origin.region
                    found[thread == main, int(number)] = region
    return found


def _launches(
    threads: Iterable[Sequence[Mapping[str, Any]]],
) -> dict[tuple[str, int], _Open]:
    """What is open at each operator, by its external id, and at each call of the driver.

    The driver's clock is another one than the operators', so that a call may seem to lie beside the
    operator that made it: where a kernel tells the operator, that is better.
    """
    found: dict[tuple[str, int], _Open] = {}
    for events in threads:
        for opened, event in _walk(events):
            args = event.get("args", {})
            if opened.is_op and "External id" in args:
                found["External id", args["External id"]] = opened
            if "correlation" in args:
                found["correlation", args["correlation"]] = opened
    return found


def _of_device(
    events: Iterable[Mapping[str, Any]],
    launches: Mapping[tuple[str, int], _Open],
    steps: Sequence[tuple[float, float]],
    regions: Mapping[tuple[bool, int], str],
) -> list[tuple[Piece, int]]:
    found: list[tuple[Piece, int]] = []
    for event in events:
        args = event.get("args", {})
        keys = [(name, args.get(name, -1)) for name in ("External id", "correlation")]
        opened = next((launches[key] for key in keys if key in launches), None)
        if opened is None:
            continue  # launched before the trace began
        step = _step_at(opened.begin_us, steps)
        if step is not None:
            end_us = event["ts"] + event["dur"]
            piece = _piece(opened, event["ts"], end_us, str(event["name"]), regions)
            found.append((piece, step))
    return found


def _of_host(
    events: Sequence[Mapping[str, Any]],
    steps: Sequence[tuple[float, float]],
    regions: Mapping[tuple[bool, int], str],
) -> Iterable[tuple[Piece, int]]:
    """Operators of a thread, each without those that it calls."""
    stack: list[tuple[_Open, bool]] = []
    at = 0.0

    def until(place_us: float) -> Iterable[tuple[Piece, int]]:
        """What runs from where we are to a place, and no operator within it begins."""
        nonlocal at
        while stack:
            opened, first = stack[-1]
            end_us = min(place_us, opened.end_us)
            step = _step_at(at, steps)
            if end_us > at and step is not None and _works(opened):
                piece = _piece(opened, at, end_us, opened.name, regions)
                yield replace(piece, first=first), step
                stack[-1] = (opened, False)
            at = max(at, end_us)
            if opened.end_us > place_us:
                break
            stack.pop()
        at = max(at, place_us)

    for opened, _ in _walk(events):
        yield from until(opened.begin_us)
        stack.append((opened, True))
    yield from until(float("inf"))


def _works(opened: _Open) -> bool:
    """Whether an operator computes; autograd's own frames are host time, as Python is."""
    autograd = opened.name.startswith(("autograd::", "torch::autograd::"))
    return opened.is_op and "::" in opened.name and not autograd


def _piece(
    opened: _Open,
    begin_us: float,
    end_us: float,
    name: str,
    regions: Mapping[tuple[bool, int], str],
) -> Piece:
    origin, phase = opened.origin, "forward"
    if opened.differentiates:
        phase = "backward"
        if not origin.region and opened.sequence is not None:
            # Autograd counts threads from 1, and the first that ran a forward pass is the main one.
            thread, number = opened.sequence
            region = regions.get((thread == 1, number), regions.get((True, number), ""))
            origin = replace(origin, region=region)
    kind = kind_of(origin, name)
    region = origin.region
    if kind in ("tables", "optimizer", "data"):
        region, phase = kind, "outside"
    elif origin.section in _OUTSIDE:
        region, phase = origin.section, "outside"
    return Piece(begin_us, end_us, kind, region, phase, name)


def _step_at(place_us: float, steps: Sequence[tuple[float, float]]) -> int | None:
    for number, (begin_us, end_us) in enumerate(steps):
        if begin_us <= place_us < end_us:
            return number
    return None
