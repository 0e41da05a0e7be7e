"""Time ``generalized_attention`` against padded and looped products of torch.

Run ``python packages/attention/benchmarks/bench_generalized_attention.py`` in the root.

On a CPU the activation is gelu and the peers are padded and looped products. On a GPU each case and
activation has four rows, forward and backward of the operator, whose tile list is kept from call to
call, and of ``flash_compat``, whose list is built anew in every call (``<case>_compat_forward``).
Nobody else's kernel for this operation installs from a registry, so that the peers beside the
second are those of softmax attention on the same shapes, as a yardstick: FlashAttention-4 where it
is installed, torch's ``varlen_attn``, and cuDNN where nothing is padded; and torch's compiler on
the padded products of one case, which takes its seconds to compile (``padded_compiled``).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from bench_jagged_flash_attention import DRAWN, gpu_peers
from packed import Fn, Window, loop_over, operands, pairs, rows, wanted
from torch import Tensor

from gem_attention.activations import activate
from gem_attention.flash_compat import generalized_attention_varlen_func
from gem_attention.kernels.generalized_attention.cases import CASES, GPU_CASES, GpuCase
from gem_attention.kernels.generalized_attention.cost import (
    generalized_attention_backward_cost,
    generalized_attention_cost,
)
from gem_attention.ops import generalized_attention
from gem_attention.patterns import visible_pairs
from gem_attention.tiles import forget_tile_lists
from gem_attention.workloads import AttentionCase
from gem_jagged.batch import Layout
from gem_jagged.ops import jagged_to_padded, padded_to_jagged
from gem_opkit.bench import BenchCase
from gem_opkit.bench_scripts import Group, run_script
from gem_opkit.budget import check_budget
from gem_opkit.cost import Cost

_COMPILED = "self_512_fill_.5"


def gelu_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    weight = F.gelu(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5)
    return (weight if mask is None else weight * mask) @ v


def padded(window: Window) -> Fn:
    """Pad and multiply; padded values are 0, so only a window needs a mask."""

    def run(q: Tensor, k: Tensor, v: Tensor, q_layout: Layout, k_layout: Layout) -> Tensor:
        padded_q = jagged_to_padded(q, q_layout).transpose(1, 2)
        padded_k, padded_v = (jagged_to_padded(x, k_layout).transpose(1, 2) for x in (k, v))
        mask = None
        if window != (None, None):
            # Self-attention: the place of a query is its number in every sequence.
            place = torch.arange(q_layout.max_length, device=q.device)
            after = place[None, :] - place[:, None]
            mask = (after >= -window[0]) & (after <= window[1])
        out = gelu_rows(padded_q, padded_k, padded_v, mask)
        return padded_to_jagged(out.transpose(1, 2), q_layout)

    return run


def costs_of(case: AttentionCase, element_bytes: int) -> tuple[Cost, Cost]:
    q_layout, k_layout = (Layout.from_lengths(list(x)) for x in (case.q_lengths, case.keys))
    size = {
        "visible_pairs": visible_pairs(q_layout.lengths, k_layout.lengths, *case.window),
        "q_tokens": q_layout.total_tokens,
        "k_tokens": k_layout.total_tokens,
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "head_width": case.head_width,
        "value_width": case.head_width,
        "element_bytes": element_bytes,
    }
    return generalized_attention_cost(**size), generalized_attention_backward_cost(**size)


def groups_of(device: str) -> Iterator[Group]:
    if device.split(":")[0] == "cuda":
        # Drawn when they are timed, and dropped after: together they would not fit.
        for one in GPU_CASES:
            yield from pairs(gpu_rows(one, device))
        return
    for case in wanted(CASES, device):
        yield case.name, partial(cpu_rows, case, device)


def cpu_rows(case: AttentionCase, device: str) -> list[BenchCase]:
    inputs = operands(case, device)
    return rows(
        case,
        partial(generalized_attention, activation="gelu", window=case.window),
        loop_over(gelu_rows, case.window),
        inputs,
        costs=costs_of(case, inputs[0].element_size()),
        peers={"padded": padded(case.window)},
        shapes={"activation": "gelu"},
    )


def gpu_rows(one: GpuCase, device: str) -> list[BenchCase]:
    case, activation = one.case, one.activation
    options = {"activation": activation, "window": case.window}
    own = partial(generalized_attention, **options)
    # The published benchmark's activation stands for all in what softmax does beside it.
    peers = gpu_peers(case) if activation == "fast_gelu" else {}
    peers |= compiled_peer(case, activation)
    described = {
        "q_lengths": case.q_lengths,
        "k_lengths": case.keys,
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "head_width": case.head_width,
        "window": case.window,
        "activation": activation,
    }
    costs = costs_of(case, 2)
    made = []
    for kind, fn, others in (("", own, {}), ("_compat", compat(options), peers)):
        for back, direction in ((False, "forward"), (True, "backward")):
            who = f"{activation}{kind}"
            made.append(
                BenchCase(
                    name=f"{case.name}_{activation}{kind}_{direction}",
                    run=partial(DRAWN.call, case, device, who, fn, back=back),
                    check=(lambda: None) if back else partial(gate, one, device, fn),
                    cost=costs[back],
                    shapes=described,
                    dtype="bfloat16",
                    peers={
                        name: partial(DRAWN.call, case, device, name, peer, back=back)
                        for name, peer in others.items()
                    },
                )
            )
    return made


def compat(options: dict[str, Any]) -> Fn:
    sides = tuple(-1 if side is None else side for side in options["window"])

    def run(q: Tensor, k: Tensor, v: Tensor, q_layout: Layout, k_layout: Layout) -> Tensor:
        forget_tile_lists()
        return generalized_attention_varlen_func(
            *(q, k, v),
            cu_seqlens_q=q_layout.offsets_O,
            cu_seqlens_k=k_layout.offsets_O,
            activation=options["activation"],
            window_size=sides,
        )

    return run


def weighed(activation: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return activate(activation, q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5) @ v


def compiled_peer(case: AttentionCase, activation: str) -> dict[str, Fn]:
    """Return torch's compiler on the padded products."""
    if case.name != _COMPILED:
        return {}
    product: Callable[..., Tensor] = torch.compile(partial(weighed, activation))

    def run(q: Tensor, k: Tensor, v: Tensor, q_layout: Layout, k_layout: Layout) -> Tensor:
        padded_q = jagged_to_padded(q, q_layout).transpose(1, 2)
        padded_k, padded_v = (jagged_to_padded(x, k_layout).transpose(1, 2) for x in (k, v))
        out = product(padded_q, padded_k, padded_v)
        return padded_to_jagged(out.transpose(1, 2), q_layout)

    return {"padded_compiled": run}


def gate(one: GpuCase, device: str, fn: Fn) -> None:
    """Compare first, middle and last sequence, forward and backward, with products in fp64."""
    case = one.case
    q, k, v, q_layout, k_layout = DRAWN.operands_of(case, device)
    out = fn(q, k, v, q_layout, k_layout)
    upstream = torch.randn_like(out)
    results = (out.detach(), *torch.autograd.grad(out, (q, k, v), upstream))
    q_ends, k_ends = (layout.lengths.cumsum(0).tolist() for layout in (q_layout, k_layout))
    for b in sorted({0, len(case.q_lengths) // 2, len(case.q_lengths) - 1}):
        rows_b = slice(q_ends[b] - case.q_lengths[b], q_ends[b])
        keys_b = slice(k_ends[b] - case.keys[b], k_ends[b])
        found = []
        for dtype in (q.dtype, torch.float64):
            leaves = [
                x[part].detach().to(dtype).requires_grad_()
                for x, part in ((q, rows_b), (k, keys_b), (v, keys_b))
            ]
            heads_first = [x.transpose(0, 1) for x in leaves]
            expected = weighed(one.activation, *heads_first).transpose(0, 1)
            gradients = torch.autograd.grad(expected, leaves, upstream[rows_b].to(dtype))
            found.append((expected.detach(), *gradients))
        parts = (rows_b, rows_b, keys_b, keys_b)
        for name, part, mine, low, exact in zip(
            ("out", "grad_q", "grad_k", "grad_v"), parts, results, *found, strict=True
        ):
            check_budget(mine[part], low, exact, what=f"{case.name}, sequence {b}, {name}")


if __name__ == "__main__":
    run_script("generalized_attention", groups_of)
