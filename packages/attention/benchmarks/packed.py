"""What the benchmarks of this folder share: groups of rows, inputs, peers and the gate."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_attention.patterns import window_mask
from gem_attention.workloads import AttentionCase
from gem_jagged.batch import Layout
from gem_jagged.ops import jagged_to_padded, padded_to_jagged
from gem_opkit.bench import BenchCase, backward_of
from gem_opkit.bench_scripts import Group
from gem_opkit.budget import check_run_budget, fresh, run_with_gradients
from gem_opkit.cost import Cost

Window = tuple[int | None, int | None]
Fn = Callable[..., Any]


def pairs(made: Sequence[BenchCase]) -> Iterator[Group]:
    """Group rows that come as forward and backward: one gate stands for both."""
    for forward, backward in zip(made[::2], made[1::2], strict=True):
        yield forward.name.removesuffix("_forward"), lambda pair=(forward, backward): pair


def lazily(make: Callable[[], Callable[[], Any]]) -> Callable[[], Any]:
    """Return a call that is made when it is first called, so that its failure is that call's."""
    made = cache(make)
    return lambda: made()()


def wanted(cases: Sequence[AttentionCase], device: str) -> list[AttentionCase]:
    """Return the cases of a device that are large enough to time."""
    kind = device.split(":")[0]
    return [case for case in cases if case.device == kind and sum(case.keys) > 1000]


def operands(case: AttentionCase, device: str) -> tuple[Tensor, Tensor, Tensor, Layout, Layout]:
    """Draw q, k and v, which require a gradient, and their layouts."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    q_layout = Layout.from_lengths(list(case.q_lengths), device=device)
    k_layout = Layout.from_lengths(list(case.keys), device=device)
    shapes = [(q_layout.total_tokens, case.heads)] + [(k_layout.total_tokens, case.kv_heads)] * 2
    q, k, v = (
        torch.randn(*shape, case.head_width, device=device, dtype=dtype).requires_grad_()
        for shape in shapes
    )
    return q, k, v, q_layout, k_layout


def rows(
    case: AttentionCase,
    run: Fn,
    loop: Fn,
    inputs: Sequence[Any],
    *,
    costs: tuple[Cost, Cost],
    peers: dict[str, Fn],
    shapes: dict[str, Any] | None = None,
) -> list[BenchCase]:
    """Make the forward and the backward row of a case; the loop is peer, gate and oracle."""

    def check() -> None:
        check_run_budget(
            run_with_gradients(run, fresh(inputs)),
            run_with_gradients(loop, fresh(inputs)),
            run_with_gradients(loop, fresh(inputs, dtype=torch.float64)),
        )

    described = {
        "q_lengths": case.q_lengths,
        "k_lengths": case.k_lengths,
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "head_width": case.head_width,
        "window": case.window,
        **(shapes or {}),
    }
    everyone = {"loop": loop, **peers}
    forward = {name: (lambda fn=fn: fn(*inputs)) for name, fn in everyone.items()}
    backward = {name: lazily(partial(backward_of, fn, inputs)) for name, fn in everyone.items()}
    dtype = str(inputs[0].dtype).removeprefix("torch.")
    return [
        BenchCase(
            name=f"{case.name}_forward",
            run=lambda: run(*inputs),
            check=check,
            cost=costs[0],
            shapes=described,
            dtype=dtype,
            peers=forward,
        ),
        BenchCase(
            name=f"{case.name}_backward",
            run=lazily(partial(backward_of, run, inputs)),
            check=lambda: None,  # the gate of the forward row compared the gradients
            cost=costs[1],
            shapes=described,
            dtype=dtype,
            peers=backward,
        ),
    ]


def loop_over(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor], window: Window
) -> Fn:
    """Make a peer that calls ``attend`` (heads first, and a mask) for one sequence at a time."""

    def run(q: Tensor, k: Tensor, v: Tensor, q_layout: Layout, k_layout: Layout) -> Tensor:
        q_lengths, k_lengths = q_layout.lengths.tolist(), k_layout.lengths.tolist()
        parts = zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True)
        outs = []
        for q_i, k_i, v_i in parts:
            mask = None
            if window != (None, None):
                mask = window_mask(len(q_i), len(k_i), *window).to(q.device)
            out = attend(q_i.transpose(0, 1), k_i.transpose(0, 1), v_i.transpose(0, 1), mask)
            outs.append(out.transpose(0, 1))
        return torch.cat(outs)

    return run


def softmax_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attend in plain torch; no row of the benchmarks is without a key, except empty sequences."""
    score = q @ k.transpose(1, 2) * q.shape[2] ** -0.5
    if mask is not None:
        score = score.masked_fill(~mask, -torch.inf)
    return score.softmax(-1) @ v


def padded_sdpa(window: Window) -> Fn:
    """Make the peer that pads, calls torch's attention with a mask, and drops the padding."""

    def run(q: Tensor, k: Tensor, v: Tensor, q_layout: Layout, k_layout: Layout) -> Tensor:
        padded_q = jagged_to_padded(q, q_layout).transpose(1, 2)
        padded_k, padded_v = (jagged_to_padded(x, k_layout).transpose(1, 2) for x in (k, v))
        key = torch.arange(k_layout.max_length, device=q.device)
        k_lengths = k_layout.lengths.to(q.device)[:, None, None]
        mask = key < k_lengths
        if window != (None, None):
            place = torch.arange(q_layout.max_length, device=q.device)[:, None]
            place = place + k_lengths - q_layout.lengths.to(q.device)[:, None, None]
            left, right = window
            if left is not None:
                mask = mask & (key >= place - left)
            if right is not None:
                mask = mask & (key <= place + right)
        out = F.scaled_dot_product_attention(padded_q, padded_k, padded_v, attn_mask=mask[:, None])
        return padded_to_jagged(out.transpose(1, 2), q_layout)

    return run


def njt_sdpa(q: Tensor, k: Tensor, v: Tensor, q_layout: Layout, k_layout: Layout) -> Tensor:
    """Call torch's attention on nested jagged tensors; it has no window."""
    nested = [
        torch.nested.nested_tensor_from_jagged(
            x, layout.offsets_O, min_seqlen=int(layout.lengths.min()), max_seqlen=layout.max_length
        ).transpose(1, 2)
        for x, layout in ((q, q_layout), (k, k_layout), (v, k_layout))
    ]
    return F.scaled_dot_product_attention(*nested).transpose(1, 2).values()
