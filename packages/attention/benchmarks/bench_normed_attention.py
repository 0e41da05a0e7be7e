"""Time ``normed_attention`` against the operators that it joins.

Run ``python packages/attention/benchmarks/bench_normed_attention.py`` in the root.

The forward is that of training: it keeps what its backward wants. The peers are ``layer_norm``,
``generalized_attention`` and ``rms_norm`` with both residuals (``separate``, each a kernel of ours
on a GPU), the same with torch's own norms and additions (``eager``) and that compiled
(``compiled``), where the attention stays ours.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from packed import Fn
from torch import Tensor

from gem_attention.kernels.normed_attention.cases import CASES
from gem_attention.kernels.normed_attention.cost import (
    normed_attention_backward_cost,
    normed_attention_cost,
)
from gem_attention.ops import generalized_attention, normed_attention
from gem_attention.workloads import AttentionCase
from gem_jagged.batch import Layout
from gem_opkit.bench import BenchCase, backward_of
from gem_opkit.bench_scripts import Group, run_script
from gem_opkit.budget import check_run_budget, fresh, run_with_gradients
from gem_precision.ops import layer_norm, rms_norm

EPS = 1e-6


def attended(q: Tensor, k: Tensor, v: Tensor, layout: Layout, k_layout: Layout) -> Tensor:
    q_THK = q.view(q.shape[0], -1, k.shape[2])
    return generalized_attention(q_THK, k, v, layout, k_layout, visible_pairs=0).flatten(1)


def separate(x: Tensor, k: Tensor, v: Tensor, layout: Layout, k_layout: Layout) -> Tensor:
    q = layer_norm(x)
    return rms_norm(attended(q, k, v, layout, k_layout), before=q, after=x)


def eager(x: Tensor, k: Tensor, v: Tensor, layout: Layout, k_layout: Layout) -> Tensor:
    q = F.layer_norm(x, (x.shape[1],), eps=EPS)
    return F.rms_norm(attended(q, k, v, layout, k_layout) + q, (x.shape[1],), eps=EPS) + x


def exact(x: Tensor, k: Tensor, v: Tensor, layout: Layout, k_layout: Layout) -> Tensor:
    """One sequence after the other in plain torch."""
    q = F.layer_norm(x, (x.shape[1],), eps=EPS)
    parts = zip(
        q.view(-1, *k.shape[1:]).transpose(0, 1).split(layout.lengths.tolist(), dim=1),
        *(each.transpose(0, 1).split(k_layout.lengths.tolist(), dim=1) for each in (k, v)),
        strict=True,
    )
    read = torch.cat(
        [F.gelu(q_i @ k_i.mT * k.shape[2] ** -0.5) @ v_i for q_i, k_i, v_i in parts], dim=1
    )
    return F.rms_norm(read.transpose(0, 1).flatten(1) + q, (x.shape[1],), eps=EPS) + x


COMPILED_CASES = ("queries_2048_keys_128_heads_1", "queries_2048_keys_128_heads_4")  # it takes long
PEERS: dict[str, Fn] = {"separate": separate, "eager": eager, "compiled": torch.compile(eager)}


class Drawn:
    """Operands and calls of the case at hand."""

    def __init__(self) -> None:
        self._name = ""
        self._inputs: tuple[Any, ...] = ()
        self._calls: dict[str, Fn] = {}

    def draw(self, case: AttentionCase, device: str) -> tuple[Any, ...]:
        """Draw tokens, keys, values and layouts; drop those of the case before."""
        if self._name != case.name:
            self._calls = {}
            torch.manual_seed(0)
            self._name = case.name
            self._inputs = drawn(case, device)
        return self._inputs

    def call(self, case: AttentionCase, device: str, who: str, fn: Fn, *, back: bool) -> Any:
        """Call forward or backward; the forward of a backward runs once."""
        inputs = self.draw(case, device)
        name = f"{who}_{back}"
        if name not in self._calls:
            made = backward_of(fn, inputs) if back else partial(fn, *inputs)
            self._calls[name] = made
        return self._calls[name]()


def drawn(case: AttentionCase, device: str, *, first: int | None = None) -> tuple[Any, ...]:
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    width, heads = case.head_width, case.heads
    layout, k_layout = (
        Layout.from_lengths(list(each[:first]), device=device)
        for each in (case.q_lengths, case.keys)
    )
    x = torch.randn(layout.total_tokens, heads * width, device=device, dtype=dtype)
    # Normalised by head, as a model's keys are, and values of length about 1.
    k, v = (
        torch.randn(k_layout.total_tokens, heads, width, device=device, dtype=dtype)
        for _ in range(2)
    )
    return (*(t.requires_grad_() for t in (x, k, v / width**0.5)), layout, k_layout)


DRAWN = Drawn()


def groups_of(device: str) -> Iterator[Group]:
    kind = device.split(":")[0]
    for case in CASES:
        if case.device == "cuda" and kind == "cuda":
            yield case.name, partial(rows_of, case, device)
        if case.device == kind == "cpu" and sum(case.q_lengths) > 100:
            yield case.name, partial(rows_of, case, device)


def rows_of(case: AttentionCase, device: str) -> list[BenchCase]:
    element_bytes = 2 if device.startswith("cuda") else 4
    size = {
        "visible_pairs": sum(q * k for q, k in zip(case.q_lengths, case.keys, strict=True)),
        "tokens": sum(case.q_lengths),
        "k_tokens": sum(case.keys),
        "heads": case.heads,
        "kv_heads": case.heads,
        "head_width": case.head_width,
        "token_bytes": element_bytes,
        "key_bytes": element_bytes,
    }
    # The reference keeps nothing; one kernel of one head keeps a, several keep q and what is read.
    keeps = (1 + (case.heads > 1)) * device.startswith("cuda")
    costs = (
        normed_attention_cost(**size, keeps=keeps),
        normed_attention_backward_cost(**size, kept=keeps),
    )
    own = partial(normed_attention, visible_pairs=0)
    # Cases share a function: behind eight of its graphs the compiler would run it as it is.
    torch.compiler.reset()
    return [
        BenchCase(
            name=f"{case.name}_{direction}",
            run=partial(DRAWN.call, case, device, "own", own, back=back),
            check=partial(gate, case, device) if not back else lambda: None,
            cost=costs[back],
            shapes={
                "q_lengths": case.q_lengths,
                "k_lengths": case.keys,
                "heads": case.heads,
                "head_width": case.head_width,
                "activation": "gelu",
            },
            dtype="bfloat16" if element_bytes == 2 else "float32",
            peers={
                who: partial(DRAWN.call, case, device, who, peer, back=back)
                for who, peer in PEERS.items()
                if who != "compiled" or case.name in COMPILED_CASES
            },
        )
        for back, direction in ((False, "forward"), (True, "backward"))
    ]


def gate(case: AttentionCase, device: str) -> None:
    """Compare the first sequences as a batch of their own, forward and backward."""
    few = drawn(case, device, first=8)
    check_run_budget(
        run_with_gradients(normed_attention, fresh(few)),
        run_with_gradients(exact, fresh(few)),
        run_with_gradients(exact, fresh(few, dtype=torch.float64)),
        what=f"{case.name}: ",
    )


if __name__ == "__main__":
    run_script("normed_attention", groups_of)
