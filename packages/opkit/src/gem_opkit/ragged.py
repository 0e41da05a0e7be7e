"""Lengths that break kernels, and the two checks that run an operator over them.

By far the largest family of faults in this field is the empty thing: an empty row, batch or
block. Every operator meets the same list of length cases.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gem_opkit.budget import (
    CheckFailure,
    check_equal_up_to_rounding,
    check_runs_equal,
    fresh,
    run_with_gradients,
    tensors_in,
    upstream_like,
)
from gem_opkit.errors import ConfigError
from gem_opkit.poison import poisoned_empty

Split = Literal["tokens", "sequences"] | Callable[[Any, list[int]], list[Any]]


@dataclass(frozen=True, slots=True)
class LengthCase:
    """Named lengths of the sequences of one batch.

    Attributes:
        name: what is special about it.
        lengths: tokens of each sequence.
    """

    name: str
    lengths: tuple[int, ...]

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @property
    def total_tokens(self) -> int:
        """Number of tokens of all sequences together."""
        return sum(self.lengths)

    def offsets(self) -> list[int]:
        """Return the first token of each sequence and the end: batch + 1 numbers from 0."""
        offsets = [0]
        for length in self.lengths:
            offsets.append(offsets[-1] + length)
        return offsets

    def offsets_tensor(self, *, dtype: torch.dtype = torch.int64, device: str = "cpu") -> Tensor:
        """Return ``offsets`` as a tensor.

        Args:
            dtype: int32 or int64.
            device: where to put it.

        Returns:
            offsets_O.
        """
        return torch.tensor(self.offsets(), dtype=dtype, device=device)


# The first case is an ordinary one, so that the empty ones meet a warm kernel and compiled code.
LENGTH_CASES: tuple[LengthCase, ...] = (
    LengthCase("nothing_empty", (3, 5, 2)),
    LengthCase("first_empty", (0, 4, 3)),
    LengthCase("last_empty", (4, 3, 0)),
    LengthCase("inner_empty", (2, 0, 0, 5)),
    LengthCase("all_empty", (0, 0, 0)),
    LengthCase("batch_of_0", ()),
    LengthCase("one_token", (1,)),
    LengthCase("giant_among_dwarfs", (1, 2, 67, 0, 1)),
    LengthCase("odd_lengths", (7, 31, 13)),
)

# Not powers of two, and one below the smallest tile.
ODD_WIDTHS: tuple[int, ...] = (3, 24, 60, 96)


def length_case_id(case: LengthCase) -> str:
    """Name a case in pytest: ``parametrize("case", LENGTH_CASES, ids=length_case_id)``.

    Args:
        case: the case.

    Returns:
        its name.
    """
    return case.name


def take_sequences(packed: Tensor, lengths: Sequence[int], picked: Sequence[int]) -> Tensor:
    """Cut sequences out of a packed tensor; differentiable.

    Args:
        packed: tokens of all sequences along the first dim.
        lengths: tokens of each sequence; they sum to the first dim.
        picked: indices of the wanted sequences, in the wanted order.

    Returns:
        tokens of the picked sequences along the first dim.
    """
    parts = packed.split(list(lengths))
    return torch.cat([packed[:0], *(parts[index] for index in picked)])


def check_ragged_edges(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    make_inputs: Callable[[LengthCase], Sequence[Any]],
    *,
    cases: Sequence[LengthCase] = LENGTH_CASES,
    compiled: bool = True,
) -> None:
    """Fixed test 6: every length case, forward and backward, eager and compiled, poisoned.

    Each result is compared with the autograd of the plain reference, up to rounding. All cases
    run through the same compiled function, ordinary lengths first.

    Args:
        fn: the public operator.
        reference: ``<op>_reference``: plain torch, differentiated by autograd.
        make_inputs: positional arguments for a case; mark what is differentiable with
            ``requires_grad=True``.
        cases: the length cases.
        compiled: also run ``torch.compile(fullgraph=True, dynamic=True)``.

    Raises:
        CheckFailure: a result differs; the message begins with the name of the case.

    Example:
        ``check_ragged_edges(jagged_mean, oracle, lambda case: (values(case), layout(case)))``
    """
    torch._dynamo.reset()
    # Sizes 0 and 1 are constants of a graph, so the cases need more graphs than the usual limit.
    limit = torch._dynamo.config.patch(recompile_limit=8 * len(cases) + 8)
    whole = torch.compile(fn, fullgraph=True, dynamic=True, backend="aot_eager")
    with limit:
        for case in cases:
            inputs = make_inputs(case)
            expected = run_with_gradients(reference, fresh(inputs))
            with poisoned_empty("all"):
                what = f"{case.name}: "
                eager = run_with_gradients(fn, fresh(inputs), what=what)
                check_runs_equal(eager, expected, what=what)
                if compiled:
                    what = f"{case.name}, compiled: "
                    graph = run_with_gradients(whole, fresh(inputs), what=what)
                    check_runs_equal(graph, eager, what=what)


def check_alone_equals_in_batch(
    fn: Callable[..., Any],
    make_inputs: Callable[[Sequence[int]], Sequence[Any]],
    lengths: Sequence[int],
    *,
    leaves: Sequence[Tensor],
    split: Split = "tokens",
    bitwise: bool = False,
) -> None:
    """Fixed test 7: a sequence gives the same result by itself as in a batch.

    Args:
        fn: the public operator or a module.
        make_inputs: positional arguments for the sequences with the given indices, cut from the
            leaves by differentiable torch (``take_sequences``).
        lengths: output tokens of each sequence of the whole batch.
        leaves: tensors with ``requires_grad=True`` from which ``make_inputs`` cuts; their
            gradients over all sequences alone must equal those of the batch.
        split: how a result falls apart into sequences: its first dim is packed tokens, or
            sequences; or a function of (result, lengths of the sequences in it).
        bitwise: demand equal bits of the outputs instead of equality up to rounding.

    Raises:
        CheckFailure: an output or a gradient differs.
        ConfigError: no leaves, although the output is differentiable.
    """
    everything = list(range(len(lengths)))
    together = _split(fn(*make_inputs(everything)), list(lengths), split)
    if len(together) != len(lengths):
        raise CheckFailure(f"split into {len(together)} parts; there are {len(lengths)} sequences")
    alone = [_split(fn(*make_inputs([index])), [lengths[index]], split)[0] for index in everything]
    scale = max((float(leaf.detach().abs().max()) for leaf in leaves if leaf.numel()), default=1.0)
    for index in everything:
        pairs = zip(tensors_in(alone[index]), tensors_in(together[index]), strict=True)
        for a, b in pairs:
            what = f"sequence {index} alone"
            check_equal_up_to_rounding(a.detach(), b.detach(), what=what, noise_scale=scale)
            if bitwise and not torch.equal(a, b):
                raise CheckFailure(f"{what}: not the same bits")
    if not leaves:
        if any(part.requires_grad for part in tensors_in(together)):
            raise ConfigError(
                "check_alone_equals_in_batch: leaves must name the differentiable tensors; "
                "got none; pass leaves=[...]"
            )
        return
    gradients = [_gradients(parts, leaves) for parts in (alone, together)]
    for index, (a, b) in enumerate(zip(*gradients, strict=True)):
        check_equal_up_to_rounding(
            a, b, what=f"gradient of leaf {index} alone", noise_scale=_UPSTREAM_SCALE
        )


_UPSTREAM_SCALE = 4.0  # standard normal upstream gradients rarely pass it


def _split(result: Any, lengths: list[int], split: Split) -> list[Any]:
    if not isinstance(split, str):
        return split(result, lengths)
    counts = lengths if split == "tokens" else [1] * len(lengths)
    pieces = [tensor.split(counts) for tensor in tensors_in(result)]
    return [tuple(piece[index] for piece in pieces) for index in range(len(lengths))]


def _gradients(parts: list[Any], leaves: Sequence[Tensor]) -> list[Tensor]:
    roots, upstream = [], []
    for index, part in enumerate(parts):
        for place, tensor in enumerate(tensors_in(part)):
            if tensor.requires_grad:
                roots.append(tensor)
                upstream.append(upstream_like(tensor, seed=1000 * index + place))
    if not roots:
        raise CheckFailure("leaves require gradients, but no output carries one back to them")
    gradients = torch.autograd.grad(roots, leaves, upstream, allow_unused=True)
    return [
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves, gradients, strict=True)
    ]
