"""Time ``pooled_attention`` against other attention kernels with seeds repeated for every sequence.

Run ``python packages/attention/benchmarks/bench_pooled_attention.py`` in the root.

On a CPU the peers are padded and looped attention of torch. On a GPU each case has rows for softmax
and for fast_gelu, forward and backward, and the peers compute softmax: FlashAttention-4 where it is
installed, torch's ``varlen_attn``, and for many seeds our own ``jagged_flash_attention``. Their
queries are repeated outside of the timing, and they leave the sum of the seeds' gradient over the
batch undone.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from bench_jagged_flash_attention import gpu_peers
from packed import (
    Fn,
    loop_over,
    operands,
    padded_sdpa,
    pairs,
    rows,
    softmax_rows,
    wanted,
)
from torch import Tensor

from gem_attention.kernels.pooled_attention.cases import CASES
from gem_attention.kernels.pooled_attention.cost import (
    pooled_attention_backward_cost,
    pooled_attention_cost,
)
from gem_attention.ops import jagged_flash_attention, pooled_attention
from gem_attention.workloads import AttentionCase
from gem_jagged.batch import Layout
from gem_opkit.bench import BenchCase, backward_of
from gem_opkit.bench_scripts import Group, run_script
from gem_opkit.budget import check_budget, check_run_budget, fresh, run_with_gradients
from gem_opkit.cost import Cost


def repeated(attend: Fn) -> Fn:
    """Give every sequence its own copy of the seeds."""

    def run(seeds: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        count, heads, width = seeds.shape
        q = seeds.expand(layout.batch, count, heads, width).reshape(-1, heads, width)
        q_layout = Layout.constant(layout.batch, count, device=q.device)
        return attend(q, k, v, q_layout, layout).view(layout.batch, count, heads, -1)

    return run


def costs_of(case: AttentionCase, element_bytes: int) -> tuple[Cost, Cost]:
    size = {
        "batch": len(case.keys),
        "seeds": case.q_lengths[0],
        "k_tokens": sum(case.keys),
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "head_width": case.head_width,
        "value_width": case.head_width,
        "element_bytes": element_bytes,
    }
    return pooled_attention_cost(**size), pooled_attention_backward_cost(**size)


def groups_of(device: str) -> Iterator[Group]:
    if device.split(":")[0] == "cuda":
        # Drawn when they are timed, and dropped after: together they would not fit.
        for case in wanted(CASES, device):
            yield from pairs(gpu_rows(case, device))
        return
    for case in wanted(CASES, device):
        yield case.name, partial(cpu_rows, case, device)


def cpu_rows(case: AttentionCase, device: str) -> list[BenchCase]:
    q, k, v, _, layout = operands(case, device)
    seeds = q[: case.q_lengths[0]].detach().requires_grad_()
    return rows(
        case,
        pooled_attention,
        repeated(loop_over(softmax_rows, (None, None))),
        (seeds, k, v, layout),
        costs=costs_of(case, q.element_size()),
        peers={"padded_sdpa": repeated(padded_sdpa((None, None)))},
    )


class Drawn:
    """Operands and calls of the case at hand."""

    def __init__(self) -> None:
        self._name = ""
        self._operands: tuple[Any, ...] = ()
        self._calls: dict[str, Callable[[], Any]] = {}

    def operands_of(self, case: AttentionCase, device: str) -> tuple[Any, ...]:
        """Draw queries, keys, values and layouts; drop those of the case before."""
        if self._name != case.name:
            self._operands, self._calls = (), {}
            torch.cuda.empty_cache()
            torch.manual_seed(0)
            self._name, self._operands = case.name, operands(case, device)
        return self._operands

    def pooled_operands(self, case: AttentionCase, device: str) -> tuple[Any, ...]:
        """Return seeds, keys, values and the layout of the keys."""
        q, k, v, _, layout = self.operands_of(case, device)
        return q[: case.q_lengths[0]].detach().requires_grad_(), k, v, layout

    def call(
        self, case: AttentionCase, device: str, who: str, fn: Fn, *, own: bool, back: bool
    ) -> Any:
        """Call forward or backward; the forward of a backward runs once."""
        self.operands_of(case, device)
        name = f"{who}_{back}"
        if name not in self._calls:
            chosen = self.pooled_operands if own else self.operands_of
            inputs = chosen(case, device)
            if back:
                self._calls[name] = backward_of(fn, inputs)
            else:
                self._calls[name] = torch.no_grad()(partial(fn, *inputs))
        return self._calls[name]()


DRAWN = Drawn()
Activation = Literal["softmax", "fast_gelu"]
KINDS: tuple[tuple[str, Activation], ...] = (("", "softmax"), ("_fast_gelu", "fast_gelu"))


def gpu_rows(case: AttentionCase, device: str) -> list[BenchCase]:
    described = {
        "seeds": case.q_lengths[0],
        "k_lengths": case.keys,
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "head_width": case.head_width,
    }
    costs = costs_of(case, 2)
    peers = gpu_peers(case)
    if case.q_lengths[0] > 64:
        peers["jagged_flash_attention"] = partial(jagged_flash_attention, visible_pairs=0)
    made = []
    for kind, activation in KINDS:
        own = partial(pooled_attention, activation=activation)
        for back, direction in ((False, "forward"), (True, "backward")):
            made.append(
                BenchCase(
                    name=f"{case.name}{kind}_{direction}",
                    run=partial(DRAWN.call, case, device, f"own{kind}", own, own=True, back=back),
                    check=partial(gate, case, device, activation) if not back else lambda: None,
                    cost=costs[back],
                    shapes=described | {"activation": activation},
                    dtype="bfloat16",
                    peers={
                        who: partial(DRAWN.call, case, device, who, peer, own=False, back=back)
                        for who, peer in peers.items()
                    },
                )
            )
    return made


def weighted(name: Activation) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """Return one sequence of the oracle with an activation in place of softmax."""
    if name == "softmax":
        return softmax_rows

    def attend(q: Tensor, k: Tensor, v: Tensor, _mask: Tensor | None) -> Tensor:
        score = q @ k.transpose(1, 2) * q.shape[2] ** -0.5
        return torch.nn.functional.gelu(score, approximate="tanh") @ v

    return attend


def gate(case: AttentionCase, device: str, activation: Activation) -> None:
    """Compare three sequences of the batch, and all gradients of the batch of these three.

    The loop over all of a case in fp64 would take longer than everything else here together.
    """
    seeds, k, v, layout = DRAWN.pooled_operands(case, device)
    own = partial(pooled_attention, activation=activation)
    loop = repeated(loop_over(weighted(activation), (None, None)))
    chosen = sorted({0, len(case.keys) // 2, len(case.keys) - 1})
    ends = layout.lengths.cumsum(0).tolist()
    parts = [slice(ends[b] - case.keys[b], ends[b]) for b in chosen]
    inputs = (
        seeds,
        *(torch.cat([x[part] for part in parts]).detach().requires_grad_() for x in (k, v)),
        Layout.from_lengths([case.keys[b] for b in chosen], device=device),
    )
    low = run_with_gradients(loop, fresh(inputs))
    exact = run_with_gradients(loop, fresh(inputs, dtype=torch.float64))
    check_run_budget(run_with_gradients(own, fresh(inputs)), low, exact, what=f"{case.name}: ")
    out = own(seeds, k, v, layout).detach()[chosen]
    check_budget(out, low.outputs[0], exact.outputs[0], what=f"{case.name}, of the whole batch")


if __name__ == "__main__":
    run_script("pooled_attention", groups_of)
