"""What the benchmarks of this folder share: command line, inputs, gates, and the rows of a case."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gem_jagged.batch import Layout
from gem_jagged.workloads import PackedCase
from gem_opkit.bench import BenchCase
from gem_opkit.bench_scripts import Group, run_script
from gem_opkit.budget import check_budget, fresh, tensors_in
from gem_opkit.cost import Cost
from gem_opkit.timing import ReplayedCall

Call = Callable[..., Any]


def main(name: str, cases: Iterable[Any], work_of: Callable[[Any, str], "Work"]) -> None:
    """Be the command line of a benchmark whose groups are a case's forward and backward.

    Args:
        name: of the benchmark.
        cases: as ``work_of`` takes them: a case, or a tuple that begins with one.
        work_of: case and device -> the operator on this case.
    """

    def groups_of(device: str) -> Iterator[Group]:
        for one in cases:
            case = one if isinstance(one, PackedCase) else one[0]
            if wanted(case, device):
                yield case.name, lambda one=one: rows_of(work_of(one, device))

    run_script(name, groups_of)


def dtype_for(device: str) -> torch.dtype:
    """Return the dtype that is trained in: bf16 on a GPU, fp32 on a CPU."""
    return torch.bfloat16 if device.startswith("cuda") else torch.float32


def tokens(lengths: Sequence[int], width: int, device: str) -> tuple[Tensor, Layout]:
    """Draw packed tokens that require a gradient, and their layout."""
    layout = Layout.from_lengths(list(lengths), device=device)
    values = torch.randn(layout.total_tokens, width, device=device, dtype=dtype_for(device))
    return values.requires_grad_(), layout


def movables(lengths: Sequence[int], width: int, device: str) -> tuple[Tensor, Layout]:
    """Draw tokens for an operator that only moves them: of width 1 ids, which have no gradient."""
    if width > 1:
        return tokens(lengths, width, device)
    layout = Layout.from_lengths(list(lengths), device=device)
    return torch.randint(2**62, (layout.total_tokens, 1), device=device), layout


@dataclass(frozen=True)
class Work:
    """One operator on one case, forward and backward.

    Attributes:
        case: where it is from; gives the rows their names.
        fn: the operator, called with ``*inputs`` and ``impl``.
        inputs: positional arguments.
        cost: of the forward.
        backward_cost: of the backward.
        loop: the same work in plain torch, one sequence after the other.
        peers: further ways to do it, by name.
        gpu_peers: those that are timed on a GPU instead. A peer that is given row numbers is spared
            what our kernels find out in every call.
        moves: whether every bit must be that of the peer; else the error budget decides.
        sizes: what a reader needs besides the lengths.
        suffix: put behind the name of the case.
    """

    case: PackedCase
    fn: Call
    inputs: tuple[Any, ...]
    cost: Cost
    backward_cost: Cost
    loop: Call
    peers: Mapping[str, Call] = field(default_factory=dict)
    gpu_peers: Mapping[str, Call] = field(default_factory=dict)
    moves: bool = True
    sizes: Mapping[str, Any] = field(default_factory=dict)
    suffix: str = ""


def wanted(case: PackedCase, device: str) -> bool:
    """Tell whether a case is timed on a device: not the edges, which are for tests."""
    return case.device == device.split(":")[0] and case.total_tokens >= 1000


def rows_of(work: Work) -> list[BenchCase]:
    """Make the rows of forward and backward.

    On a GPU all are replayed from CUDA graphs, because a narrow batch moves in less time than it
    takes to launch a call, and torch's index operations take the place of the loop, which over
    some thousand sequences would time Python. Beside them stands a copy of as many bytes: what is
    small is slowed down by its start and end, and so is its copy.
    """
    values = next(x for x in work.inputs if isinstance(x, Tensor))
    is_graph = values.is_cuda
    index: Call = partial(work.fn, impl="reference")
    peers = (
        {"torch_index": index, **work.gpu_peers} if is_graph else {"loop": work.loop, **work.peers}
    )
    oracle = index if is_graph else work.loop
    rows = []
    for which, cost in (("forward", work.cost), ("backward", work.backward_cost)):
        if which == "backward" and not values.requires_grad:
            continue
        make = _forward_of if which == "forward" else _backward_of
        everyone = {"": work.fn, **peers}
        timed = {
            who: ReplayedCall(partial(make, call, work.inputs))
            if is_graph
            else make(call, work.inputs)
            for who, call in everyone.items()
        }
        if is_graph:
            copy = partial(_copy_of, cost.bytes, values.device)
            timed["copy_of_as_many_bytes"] = ReplayedCall(copy)
        run = timed.pop("")
        if work.moves:
            check = equals(run, lambda: oracle(*work.inputs))
            if which == "backward":
                check = equals(run, lambda: _backward_of(oracle, work.inputs)())
        else:
            check = within_budget(work.fn, oracle, work.inputs)
        rows.append(
            BenchCase(
                name=f"{work.case.name}{work.suffix}_{which}",
                run=run,
                check=check,
                cost=cost,
                shapes={
                    "sequences": len(work.case.lengths),
                    "total_tokens": work.case.total_tokens,
                    "max_length": max(work.case.lengths),
                    "width": work.case.width,
                    **work.sizes,
                    "timed": "graph replay" if is_graph else "call",
                },
                dtype=str(values.dtype).removeprefix("torch."),
                peers=timed,
            )
        )
    return rows


def rows_from(fn: Call, rows: int, *args: Any, **options: Any) -> Tensor:
    """Say from which row of its source each row of a move comes.

    Args:
        fn: the operator, called with a tensor of row numbers.
        rows: of the source.
        *args: what the operator takes behind the source.
        **options: of the operator.

    Returns:
        int64, on the device of the layouts.
    """
    device = next(x.offsets_O.device for x in args if isinstance(x, Layout))
    numbers = torch.arange(rows, device=device)
    return fn(numbers, *args, impl="reference", **options).flatten()


def gathered(rows_S: Tensor, values: Tensor, *_: Any) -> Tensor:
    """Move rows as torch does for who has their numbers."""
    return values.index_select(0, rows_S)


def _copy_of(moved_bytes: float, device: torch.device) -> Call:
    """Return a copy that reads half of so many bytes and writes the other half."""
    source = torch.empty(max(1, int(moved_bytes) // 16), dtype=torch.int64, device=device).random_()
    # In a graph torch's copy_ is a node of the driver, which is slower than any kernel that copies.
    return partial(torch.bitwise_not, source, out=torch.empty_like(source))


def _forward_of(fn: Call, inputs: Sequence[Any]) -> Call:
    return lambda: fn(*inputs)


def _backward_of(fn: Call, inputs: Sequence[Any]) -> Call:
    """Run forward once; return a call of its backward alone."""
    # Leaves of its own: what adds up the gradient of a leaf belongs to the stream of its first
    # use, and a capture on another stream would have to wait for that one.
    own = [
        x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs
    ]
    leaves = [x for x in own if isinstance(x, Tensor) and x.requires_grad]
    roots = list(tensors_in(fn(*own)))
    upstream = [_upstream(root) for root in roots]
    return lambda: torch.autograd.grad(roots, leaves, upstream, retain_graph=True)


def _upstream(root: Tensor) -> Tensor:
    # Drawn on the device: a billion numbers drawn on the host would take longer than all timing.
    generator = torch.Generator(root.device).manual_seed(0)
    values = torch.randn(root.shape, generator=generator, device=root.device, dtype=torch.bfloat16)
    return values.to(root.dtype)


def equals(run: Call, oracle: Call) -> Callable[[], None]:
    """Make the gate of an operator that moves values: every bit as the peer has it."""

    def check() -> None:
        got, expected = run(), oracle()
        pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]
        for index, (a, b) in enumerate(pairs):
            if not torch.equal(a, b):
                raise ValueError(f"result {index} differs from that of the peer")

    return check


def within_budget(fn: Call, oracle: Call, inputs: Sequence[Any]) -> Callable[[], None]:
    """Make the gate of an operator that computes: the error budget, for outputs and gradients."""

    def results(call: Call, given: Sequence[Any]) -> list[Tensor]:
        return [x.detach() for x in (*tensors_in(call(*given)), *_backward_of(call, given)())]

    def check() -> None:
        exact = results(oracle, fresh(inputs, dtype=torch.float64))
        triples = zip(results(fn, inputs), results(oracle, inputs), exact, strict=True)
        for index, (kernel, low, right) in enumerate(triples):
            check_budget(kernel, low, right, what=f"result {index}", noise_scale=4.0)

    return check
