"""Time whole layers, a training pass forward and backward: what each pattern and each fusion costs.

Run ``python packages/attention/benchmarks/bench_layers.py`` in the root.

``GdpaPffn`` has as peers the same layer with one operator after the other, our norms with their
residuals around attention (``separate``, ``impl="reference"``), and that with torch's norms and
additions (``unfused``); its rows have one head and four. Beside torch.compile it is timed by the
operator's own benchmark, ``bench_normed_attention``. ``transformer`` is a layer of self-attention
as a model has it: its peers leave one fusion out each (``norm``: the norm and its place beside the
residual stream; ``rotary``: norm and rotation of queries and keys; ``gate``: gate and residual),
all of them (``unfused``), and all of them with torch.compile (``compiled``). Rows of
``SelfAttention`` differ in the pattern alone; their peer rotates queries and keys in torch before
attention.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gem_attention.contract import AttentionSpec
from gem_attention.costs import (
    block_attention_backward_cost,
    block_attention_cost,
    generalized_attention_backward_cost,
    generalized_attention_cost,
)
from gem_attention.layers import GdpaPffn, SelfAttention
from gem_attention.ops import block_attention, generalized_attention
from gem_attention.patterns import visible_pairs, visible_pairs_block
from gem_attention.projected import attend
from gem_attention.rotary import apply_rotary, rote_angles
from gem_jagged.batch import Layout
from gem_jagged.offsets import positions, sequence_ids
from gem_jagged.workloads import uniform_lengths
from gem_opkit.bench import BenchCase
from gem_opkit.bench_scripts import Group, run_script
from gem_opkit.budget import check_run_budget, fresh, run_with_gradients
from gem_opkit.cost import Cost
from gem_precision.layers import RmsNorm
from gem_precision.norms import rms_normalize
from gem_precision.ops import gated_residual

# A stream of the model's width, a quarter of its batch; context tokens of the summary.
LENGTHS = {"cuda": uniform_lengths(256, 2048, fill=0.5), "cpu": uniform_lengths(32, 128, fill=0.5)}
HEADS, CONTEXT = {"cuda": (4, 128), "cpu": (4, 16)}, {"cuda": 128, "cpu": 8}
PATTERNS: dict[str, dict[str, Any]] = {
    "full": {"pattern": "full"},
    "window_64": {"pattern": "window", "window_tokens": 64},
    "block_64": {"pattern": "block", "block_tokens": 64},
}


class Turned(nn.Module):
    """A layer of self-attention that rotates queries and keys in torch."""

    def __init__(self, layer: SelfAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_TD: Tensor, layout: Layout, gap_T: Tensor) -> Tensor:
        """Do what the layer does."""
        spec = self.layer.spec
        qkv = self.layer.qkv(x_TD).view(x_TD.shape[0], 3 * spec.heads, spec.head_dim)
        qk, v = qkv.split((2 * spec.heads, spec.heads), dim=1)
        angles = rote_angles(positions(layout.offsets_O, qk.shape[0]), gap_T, spec.head_dim)
        q, k = apply_rotary(rms_normalize(qk), *angles).split(spec.heads, dim=1)
        if spec.pattern == "block":
            out = block_attention(q, k, v, layout, block_tokens=spec.block_tokens, visible_pairs=0)
        else:
            out = attend(spec, q, k, v, layout, layout, 0)
        return self.layer.out(out.flatten(1))


class Transformer(nn.Module):
    """Norm, self-attention, gate and residual, with some of their fusions left out.

    Args:
        layer: the attention.
        apart: of "norm", "rotary" and "gate" those that are done in torch.
    """

    def __init__(self, layer: SelfAttention, apart: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.layer = Turned(layer) if "rotary" in apart else layer
        self.norm = RmsNorm(layer.out.weight.shape[0])
        self.apart = apart

    def forward(self, x_TD: Tensor, layout: Layout, gap_T: Tensor, gate_BD: Tensor) -> Tensor:
        """Run the layer."""
        if "norm" in self.apart:
            normed_TD = F.rms_norm(x_TD, x_TD.shape[1:], eps=self.norm.eps)
        else:
            normed_TD, x_TD = self.norm.beside(x_TD)
        pairs = {} if "rotary" in self.apart else {"visible_pairs": 0}
        out_TD = self.layer(normed_TD, layout, gap_T, **pairs)
        if "gate" not in self.apart:
            return gated_residual(x_TD, out_TD, gate_BD, layout.offsets_O)
        return x_TD + out_TD * gate_BD[sequence_ids(layout.offsets_O, x_TD.shape[0])]


class Plain(nn.Module):
    """A GDPA layer with torch's norms and additions."""

    def __init__(self, layer: GdpaPffn) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_TD: Tensor, layout: Layout, context_BND: Tensor) -> Tensor:
        """Do what the layer does."""
        spec, width = self.layer.spec, (x_TD.shape[1],)
        batch, count, _ = context_BND.shape
        kv = self.layer.kv(context_BND).view(batch * count, 2 * spec.heads, spec.head_dim)
        k, v = kv.split(spec.heads, dim=1)
        q = F.layer_norm(x_TD, width, eps=self.layer.norm.eps)
        read = generalized_attention(
            q.view(-1, spec.heads, spec.head_dim),
            rms_normalize(k),
            v,
            layout,
            Layout.constant(batch, count, device=x_TD.device),
            visible_pairs=0,
        )
        return F.rms_norm(read.flatten(1) + q, width, eps=self.layer.out_norm.eps) + x_TD


def training_pass(layer: nn.Module, inputs: tuple[Any, ...], upstream: Tensor) -> Callable[[], Any]:
    leaves = [*layer.parameters(), inputs[0], *inputs[3:]]

    def run() -> Any:
        return torch.autograd.grad(layer(*inputs), leaves, upstream, allow_unused=True)

    return run


def linear_cost(rows: int, weight: int, element_bytes: int) -> Cost:
    """A product forward and twice backward; its inputs and outputs are counted with the layer."""
    return Cost(flops=6 * rows * weight, bytes=3 * weight * element_bytes)


def groups_of(device: str) -> Iterator[Group]:
    kind = device.split(":")[0]
    for name, fields in PATTERNS.items():
        yield f"self_attention_{name}", partial(self_attention, name, fields, device, kind)
    for heads in (1, HEADS[kind][0]):
        yield f"gdpa_pffn_heads_{heads}", partial(gdpa_pffn, heads, device, kind)
    # What compiles takes long, and comes last.
    yield "transformer_window_64", partial(transformer, device, kind)


def drawn(kind: str, device: str, width: int) -> tuple[Tensor, Layout, Tensor, torch.dtype]:
    # Cases share modules: behind eight graphs of one the compiler would run it as it is.
    torch.compiler.reset()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    layout = Layout.from_lengths(list(LENGTHS[kind]), device=device)
    x = torch.randn(layout.total_tokens, width, device=device, dtype=dtype).requires_grad_()
    gap = 10.0 ** (7.5 * torch.rand(layout.total_tokens, device=device))
    return x, layout, gap, dtype


def self_attention(name: str, fields: dict[str, Any], device: str, kind: str) -> list[BenchCase]:
    heads, head_dim = HEADS[kind]
    spec = AttentionSpec(**fields, heads=heads, head_dim=head_dim, rotary="rote")
    x, layout, gap, dtype = drawn(kind, device, heads * head_dim)
    layer = SelfAttention(heads * head_dim, spec).to(device, dtype)
    pairs = (
        visible_pairs_block(layout.lengths, 64)
        if spec.pattern == "block"
        else visible_pairs(layout.lengths, layout.lengths, *spec.window)
    )
    size = {
        "visible_pairs": pairs,
        "tokens": layout.total_tokens,
        "heads": heads,
        "kv_heads": heads,
        "head_width": head_dim,
        "value_width": head_dim,
        "element_bytes": x.element_size(),
    }
    # Pairs decide the FLOPs of every pattern, and the bytes are the same.
    cost = block_attention_cost(**size) + block_attention_backward_cost(**size)
    cost += linear_cost(layout.total_tokens, 4 * x.shape[1] ** 2, x.element_size())
    unfused = Turned(layer)
    return row(
        f"self_attention_{name}", layer, (x, layout, gap), cost, {"unfused": unfused}, unfused
    )


def transformer(device: str, kind: str) -> list[BenchCase]:
    heads, head_dim = HEADS[kind]
    spec = AttentionSpec(**PATTERNS["window_64"], heads=heads, head_dim=head_dim, rotary="rote")
    x, layout, gap, dtype = drawn(kind, device, heads * head_dim)
    attention = SelfAttention(heads * head_dim, spec).to(device, dtype)
    gate_BD = torch.rand(layout.batch, x.shape[1], device=device, dtype=dtype).requires_grad_()
    size = {
        "visible_pairs": visible_pairs(layout.lengths, layout.lengths, *spec.window),
        "tokens": layout.total_tokens,
        "heads": heads,
        "kv_heads": heads,
        "head_width": head_dim,
        "value_width": head_dim,
        "element_bytes": x.element_size(),
    }
    cost = block_attention_cost(**size) + block_attention_backward_cost(**size)
    cost += linear_cost(layout.total_tokens, 4 * x.shape[1] ** 2, x.element_size())
    parts = ("norm", "rotary", "gate")
    unfused = Transformer(attention, parts)
    peers: dict[str, Any] = {part: Transformer(attention, (part,)) for part in parts}
    peers |= {"unfused": unfused, "compiled": torch.compile(unfused)}
    inputs = (x, layout, gap, gate_BD)
    return row("transformer_window_64", Transformer(attention), inputs, cost, peers, unfused)


def gdpa_pffn(heads: int, device: str, kind: str) -> list[BenchCase]:
    head_dim, count = HEADS[kind][1], CONTEXT[kind]
    width = heads * head_dim
    spec = AttentionSpec(heads=heads, head_dim=head_dim, activation="gelu")
    x, layout, _, dtype = drawn(kind, device, width)
    layer = GdpaPffn(width, spec, width).to(device, dtype)
    context = torch.randn(layout.batch, count, width, device=device, dtype=dtype)
    size = {
        "visible_pairs": layout.total_tokens * count,
        "q_tokens": layout.total_tokens,
        "k_tokens": layout.batch * count,
        "heads": heads,
        "kv_heads": heads,
        "head_width": head_dim,
        "value_width": head_dim,
        "element_bytes": x.element_size(),
    }
    cost = generalized_attention_cost(**size) + generalized_attention_backward_cost(**size)
    cost += linear_cost(layout.batch * count, 2 * width**2, x.element_size())
    unfused, separate = Plain(layer), copy.copy(layer)
    separate.impl = "reference"
    peers: dict[str, Any] = {"separate": separate, "unfused": unfused}
    return row(f"gdpa_pffn_heads_{heads}", layer, (x, layout, context), cost, peers, unfused)


def row(
    name: str,
    layer: nn.Module,
    inputs: tuple[Any, ...],
    cost: Cost,
    peers: dict[str, Any],
    honest: nn.Module,
) -> list[BenchCase]:
    x, layout = inputs[:2]
    upstream = torch.randn_like(x)
    return [
        BenchCase(
            name=name,
            run=training_pass(layer, inputs, upstream),
            check=partial(gate, name, layer, honest, inputs),
            cost=cost,
            shapes={"lengths": layout.lengths.tolist(), "width": x.shape[1]},
            dtype=str(x.dtype).removeprefix("torch."),
            peers={who: training_pass(peer, inputs, upstream) for who, peer in peers.items()},
        )
    ]


def gate(name: str, layer: nn.Module, honest: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Compare the first four sequences and the gradient of their tokens with the layer in fp64."""
    x, layout, *others = inputs
    lengths = layout.lengths.tolist()[:4]
    # Others are of each token where they have one dim, else of each sequence.
    others = [t.detach()[: sum(lengths) if t.ndim == 1 else 4] for t in others]
    few = (
        x[: sum(lengths)].detach().requires_grad_(),
        Layout.from_lengths(lengths, device=x.device),
        *others,
    )
    exact = copy.deepcopy(layer).double()
    wide = (
        few[0].detach().double().requires_grad_(),
        few[1],
        *(t if t.ndim == 1 else t.double() for t in others),
    )
    check_run_budget(
        run_with_gradients(layer, fresh(few)),
        run_with_gradients(honest, fresh(few)),
        run_with_gradients(exact, wide),
        what=f"{name}: ",
    )


if __name__ == "__main__":
    run_script("layers", groups_of)
