"""Time ``jagged_flash_attention`` against other attention kernels on the same jagged batches.

Run ``python packages/attention/benchmarks/bench_jagged_flash_attention.py`` in the root.

On a CPU the peers are padded, nested and looped attention of torch. On a GPU each case has four
rows, forward and backward of each of

- the operator, whose tile list is kept from call to call (``<case>_forward``), and
- ``flash_compat``, whose list is built anew in every call (``<case>_compat_forward``),

and the peers stand beside the second: FlashAttention-4 where it is installed, torch's
``varlen_attn``, and cuDNN's kernel on padded sequences where all are equally long, so that nothing
is padded. A GPU is slower when hot: compare what stands in one row, not rows of different runs.
FlashAttention-4 compiles for some seconds at each new shape of heads and window; it keeps the
result if ``FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1`` is set.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from packed import (
    Window,
    loop_over,
    njt_sdpa,
    operands,
    padded_sdpa,
    pairs,
    rows,
    softmax_rows,
    wanted,
)
from torch import Tensor

from gem_attention.flash_compat import flash_attn_varlen_func
from gem_attention.kernels.jagged_flash_attention.cases import CASES
from gem_attention.kernels.jagged_flash_attention.cost import (
    jagged_flash_attention_backward_cost,
    jagged_flash_attention_cost,
)
from gem_attention.ops import jagged_flash_attention
from gem_attention.patterns import visible_pairs, window_mask
from gem_attention.tiles import forget_tile_lists
from gem_attention.workloads import POOLED_WORK, SELF_WORK, AttentionCase
from gem_jagged.batch import Layout
from gem_jagged.workloads import zipf_lengths
from gem_opkit.bench import BenchCase, backward_of
from gem_opkit.bench_scripts import Group, run_script
from gem_opkit.budget import check_budget
from gem_opkit.cost import Cost

Fn = Callable[..., Any]

GPU_CASES: tuple[AttentionCase, ...] = (
    *CASES,
    *POOLED_WORK,
    *(
        replace(case, name=f"{case.name}_width_64", heads=8, kv_heads=8, head_width=64)
        for case in SELF_WORK
        if case.name in ("self_512_fill_.5", "self_2048_fill_.5")
    ),
    AttentionCase("self_zipf_4096", zipf_lengths(4096, 4096, alpha=1.2)),
)


def costs_of(case: AttentionCase, inputs: Sequence[Any]) -> tuple[Cost, Cost]:
    q, _, _, q_layout, k_layout = inputs
    size = {
        "visible_pairs": visible_pairs(q_layout.lengths, k_layout.lengths, *case.window),
        "q_tokens": q_layout.total_tokens,
        "k_tokens": k_layout.total_tokens,
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "head_width": case.head_width,
        "value_width": case.head_width,
        "element_bytes": q.element_size(),
    }
    return jagged_flash_attention_cost(**size), jagged_flash_attention_backward_cost(**size)


def groups_of(device: str) -> Iterator[Group]:
    if device.split(":")[0] == "cuda":
        # Drawn when they are timed, and dropped after: together they would not fit.
        for case in wanted(GPU_CASES, device):
            yield from pairs(gpu_rows(case, device))
        return
    for case in wanted(CASES, device):
        yield case.name, partial(cpu_rows, case, device)


def cpu_rows(case: AttentionCase, device: str) -> list[BenchCase]:
    inputs = operands(case, device)
    peers = {"padded_sdpa": padded_sdpa(case.window)}
    if case.window == (None, None):
        peers["njt_sdpa"] = njt_sdpa
    return rows(
        case,
        partial(jagged_flash_attention, window=case.window),
        loop_over(softmax_rows, case.window),
        inputs,
        costs=costs_of(case, inputs),
        peers=peers,
    )


class Drawn:
    """Operands and calls of the case at hand; those of all cases together would not fit."""

    def __init__(self) -> None:
        self._name = ""
        self._operands: tuple[Any, ...] = ()
        self._calls: dict[str, Callable[[], Any]] = {}

    def operands_of(self, case: AttentionCase, device: str) -> tuple[Any, ...]:
        """Draw the operands of a case, and drop those of the one before."""
        if self._name != case.name:
            self._operands, self._calls = (), {}
            torch.cuda.empty_cache()
            torch.manual_seed(0)
            self._name, self._operands = case.name, operands(case, device)
        return self._operands

    def call(self, case: AttentionCase, device: str, who: str, fn: Fn, *, back: bool) -> Any:
        """Call forward or backward; the forward of a backward runs once."""
        inputs = self.operands_of(case, device)
        name = f"{who}_{back}"
        if name not in self._calls:
            if back:
                self._calls[name] = backward_of(fn, inputs)
            else:
                self._calls[name] = torch.no_grad()(partial(fn, *inputs))
        return self._calls[name]()


DRAWN = Drawn()


def gpu_rows(case: AttentionCase, device: str) -> list[BenchCase]:
    own = partial(jagged_flash_attention, window=case.window)
    described = {
        "q_lengths": case.q_lengths,
        "k_lengths": case.keys,
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "head_width": case.head_width,
        "window": case.window,
    }
    costs = cost_from_lengths(case)
    made = []
    for kind, fn, peers in (("", own, {}), ("_compat", compat(case), gpu_peers(case))):
        for back, direction in ((False, "forward"), (True, "backward")):
            made.append(
                BenchCase(
                    name=f"{case.name}{kind}_{direction}",
                    run=partial(DRAWN.call, case, device, kind or "own", fn, back=back),
                    check=partial(gate, case, device, fn) if not back else lambda: None,
                    cost=costs[back],
                    shapes=described,
                    dtype="bfloat16",
                    peers={
                        who: partial(DRAWN.call, case, device, who, peer, back=back)
                        for who, peer in peers.items()
                    },
                )
            )
    return made


def cost_from_lengths(case: AttentionCase) -> tuple[Cost, Cost]:
    q_layout, k_layout = (Layout.from_lengths(list(x)) for x in (case.q_lengths, case.keys))
    stand_in = torch.empty(0, dtype=torch.bfloat16)
    return costs_of(case, (stand_in, None, None, q_layout, k_layout))


def compat(case: AttentionCase) -> Fn:
    def run(q: Tensor, k: Tensor, v: Tensor, q_layout: Layout, k_layout: Layout) -> Any:
        forget_tile_lists()
        window = tuple(-1 if side is None else side for side in case.window)
        return flash_attn_varlen_func(
            q, k, v, q_layout.offsets_O, k_layout.offsets_O, window_size=window, visible_pairs=0
        )

    return run


def gpu_peers(case: AttentionCase) -> dict[str, Fn]:
    """Return the peers that are installed and take the case.

    Each is imported when it is first called: what one of them breaks is its own row's entry.
    """
    window = None if case.window == (None, None) else case.window

    def offsets(layout: Layout) -> Tensor:
        return layout.offsets_O.to(torch.int32)

    def varlen_attn(q: Tensor, k: Tensor, v: Tensor, q_layout: Layout, k_layout: Layout) -> Any:
        varlen = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        sizes = (q_layout.max_length, k_layout.max_length)
        more = {} if window is None else {"window_size": window}
        return varlen(q, k, v, offsets(q_layout), offsets(k_layout), *sizes, **more)

    def padded_cudnn(q: Tensor, k: Tensor, v: Tensor, q_layout: Layout, k_layout: Layout) -> Any:
        parts = [
            x.view(len(layout.lengths), layout.max_length, *x.shape[1:]).transpose(1, 2)
            for x, layout in ((q, q_layout), (k, k_layout), (v, k_layout))
        ]
        attention = importlib.import_module("torch.nn.attention")
        with attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*parts)

    peers: dict[str, Fn] = {"varlen_attn": varlen_attn}
    if window is None and len(set(case.q_lengths)) == len(set(case.keys)) == 1:
        peers["padded_cudnn"] = padded_cudnn
    if importlib.util.find_spec("flash_attn") is None:
        return peers

    def flash_attention_4(
        q: Tensor, k: Tensor, v: Tensor, q_layout: Layout, k_layout: Layout
    ) -> Any:
        flash = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
        out = flash(
            q,
            k,
            v,
            cu_seqlens_q=offsets(q_layout),
            cu_seqlens_k=offsets(k_layout),
            max_seqlen_q=q_layout.max_length,
            max_seqlen_k=k_layout.max_length,
            window_size=case.window,
        )
        return out[0] if isinstance(out, tuple) else out

    return {"flash_attention_4": flash_attention_4, **peers}


def gate(case: AttentionCase, device: str, fn: Fn) -> None:
    """Compare first, middle and last sequence, forward and backward, with the loop.

    The loop over all of a case in fp64 would take longer than everything else here together.
    """
    q, k, v, q_layout, k_layout = DRAWN.operands_of(case, device)
    out = fn(q, k, v, q_layout, k_layout)
    upstream = torch.randn_like(out)  # on its device: a host would take longer than the rest
    results = (out.detach(), *torch.autograd.grad(out, (q, k, v), upstream))
    chosen = sorted({0, len(case.q_lengths) // 2, len(case.q_lengths) - 1})
    loop = loop_over(softmax_rows, case.window)
    q_ends, k_ends = (layout.lengths.cumsum(0).tolist() for layout in (q_layout, k_layout))
    for b in chosen:
        rows_b = slice(q_ends[b] - case.q_lengths[b], q_ends[b])
        keys_b = slice(k_ends[b] - case.keys[b], k_ends[b])
        layouts = [
            Layout.from_lengths([n], device=device) for n in (case.q_lengths[b], case.keys[b])
        ]
        found = []
        for dtype in (q.dtype, torch.float64):
            leaves = [
                x[part].detach().to(dtype).requires_grad_()
                for x, part in ((q, rows_b), (k, keys_b), (v, keys_b))
            ]
            expected = loop(*leaves, *layouts)
            found.append(
                (
                    expected.detach(),
                    *torch.autograd.grad(expected, leaves, upstream[rows_b].to(dtype)),
                )
            )
        parts = (rows_b, rows_b, keys_b, keys_b)
        exact = [x[part].detach().double() for x, part in zip((q, k, v), parts[1:], strict=True)]
        sizes = (0.0, *sizes_of_terms(exact, upstream[rows_b].double(), case.window))
        for name, part, size, mine, low, right in zip(
            ("out", "grad_q", "grad_k", "grad_v"), parts, sizes, results, *found, strict=True
        ):
            what = f"{case.name}, sequence {b}, {name}"
            check_budget(mine[part], low, right, what=what, noise_scale=size)


def sizes_of_terms(
    operands: Sequence[Tensor], upstream: Tensor, window: Window
) -> tuple[float, float, float]:
    """Return how large the terms of the gradients of q, k and v are together, however they cancel.

    A sum of float32 is off by its eps times that, in whatever order it is taken. Where a query
    sees one key its gradient is 0 and this is what is left; autograd's softmax is exact there.
    """
    q, k, v = operands
    group = q.shape[1] // k.shape[1]
    q, upstream = q.transpose(0, 1), upstream.transpose(0, 1).abs()
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    eye = torch.eye(k.shape[1], dtype=q.dtype, device=q.device).expand(len(k), -1, -1)
    mask = None
    if window != (None, None):
        mask = window_mask(q.shape[1], k.shape[1], *window).to(q.device)
    p = softmax_rows(q, k, eye, mask)
    products = upstream @ v.abs().transpose(1, 2)
    weights = q.shape[2] ** -0.5 * p * (products + (p * products).sum(-1, keepdim=True))
    terms = (
        weights @ k.abs(),
        weights.transpose(1, 2) @ q.abs(),
        p.transpose(1, 2) @ upstream,
    )
    of_q, of_k, of_v = (float(x.max()) for x in terms)
    return of_q, of_k * group, of_v * group


if __name__ == "__main__":
    run_script("jagged_flash_attention", groups_of)
