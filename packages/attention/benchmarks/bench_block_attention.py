"""Time ``block_attention`` against other attention kernels on the same blocks.

Run ``python packages/attention/benchmarks/bench_block_attention.py`` in the root.

On a CPU the peers are torch's attention on padded blocks and on single blocks. On a GPU a case has
rows forward and backward, without a rotation and with one by place and log gap (``_rote``). Peers
without a rotation take every block as a sequence of its own: FlashAttention-4 where it is
installed, torch's ``varlen_attn``, our ``jagged_flash_attention``, and compiled ``flex_attention``
on blocks that are padded outside of the timing. Beside the rotated rows stands what a model does
without the fusion: angles, rotation and ``block_attention``, as they are and compiled. What
compiles for long and the reference are peers of one case alone.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from bench_jagged_flash_attention import gpu_peers
from packed import Fn, loop_over, operands, padded_sdpa, pairs, rows, softmax_rows, wanted
from torch import Tensor

from gem_attention.contract import Rotary
from gem_attention.kernels.block_attention.cases import CASES
from gem_attention.kernels.block_attention.cost import (
    block_attention_backward_cost,
    block_attention_cost,
    block_pairs_in_sequence,
)
from gem_attention.ops import block_attention, jagged_flash_attention
from gem_attention.rotary import apply_rotary, rote_angles
from gem_attention.workloads import AttentionCase
from gem_jagged.batch import Layout
from gem_jagged.offsets import positions
from gem_opkit.bench import BenchCase, backward_of
from gem_opkit.bench_scripts import Group, run_script
from gem_opkit.budget import check_budget
from gem_opkit.cost import Cost
from gem_opkit.impl import Impl

BLOCK = 64
# On a GPU: the published number of tokens, one stream of a model with blocks of each length and
# with narrow heads, and the published batch, which alone has the peers that compile for long and
# the reference.
GPU_CASES = [
    (case, block_tokens)
    for name, lengths in (
        ("blocks_1735537_tokens", (64,)),
        ("blocks_2048_fill_.5", (64, 128, 32)),
        ("blocks_2048_fill_.5_width_64", (128,)),
        ("blocks_2000_fill_.7", (64,)),
    )
    for case in CASES
    if case.name == name
    for block_tokens in lengths
]
WITH_SLOW_PEERS = "blocks_2000_fill_.7"


def blocks_of(lengths: tuple[int, ...], block_tokens: int) -> list[int]:
    """Return the lengths of all blocks, in order."""
    blocks: list[int] = []
    for tokens in lengths:
        blocks += [block_tokens] * (tokens // block_tokens)
        blocks += [tokens % block_tokens] if tokens % block_tokens else []
    return blocks


def as_sequences(attend: Fn, block_tokens: int = BLOCK) -> Fn:
    """Treat every block as a sequence."""

    def run(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        blocks = blocks_of(tuple(layout.lengths.tolist()), block_tokens)
        cut = Layout.from_lengths(blocks, device=q.device, dtype=torch.int64)
        return attend(q, k, v, cut, cut)

    return run


def costs_of(case: AttentionCase, block_tokens: int, element_bytes: int) -> tuple[Cost, Cost]:
    size = {
        "visible_pairs": sum(block_pairs_in_sequence(n, block_tokens) for n in case.q_lengths),
        "tokens": sum(case.q_lengths),
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "head_width": case.head_width,
        "value_width": case.head_width,
        "element_bytes": element_bytes,
    }
    return block_attention_cost(**size), block_attention_backward_cost(**size)


def groups_of(device: str) -> Iterator[Group]:
    if device.split(":")[0] == "cuda":
        # Drawn when they are timed, and dropped after: together they would not fit.
        for case, block_tokens in GPU_CASES:
            yield from pairs(gpu_rows(case, block_tokens, device))
        return
    for case in wanted(CASES, device):
        yield case.name, partial(cpu_rows, case, device)


def cpu_rows(case: AttentionCase, device: str) -> list[BenchCase]:
    q, k, v, layout, _ = operands(case, device)
    return rows(
        case,
        block_attention,
        as_sequences(loop_over(softmax_rows, (None, None))),
        (q, k, v, layout),
        costs=costs_of(case, BLOCK, q.element_size()),
        peers={"padded_sdpa": as_sequences(padded_sdpa((None, None)))},
        shapes={"block_tokens": BLOCK},
    )


class Drawn:
    """Operands and calls of the case at hand."""

    def __init__(self) -> None:
        self._key: Any = None
        self.given: tuple[Any, ...] = ()
        self._calls: dict[str, Callable[[], Any]] = {}

    def draw(self, case: AttentionCase, block_tokens: int, device: str) -> tuple[Any, ...]:
        """Draw q, k, v, the layout, that of the blocks, and gaps; drop those of the case before."""
        if self._key != (case.name, block_tokens):
            self.given, self._calls = (), {}
            torch.cuda.empty_cache()
            torch.manual_seed(0)
            q, k, v, layout, _ = operands(case, device)
            cut = Layout.from_lengths(blocks_of(case.q_lengths, block_tokens), device=device)
            gap = 10.0 ** (7.5 * torch.rand(layout.total_tokens, device=device))
            self._key, self.given = (case.name, block_tokens), (q, k, v, layout, cut, gap)
        return self.given

    def call(
        self, key: tuple[AttentionCase, int, str], who: str, prepare: Fn, *, back: bool
    ) -> Any:
        """Call forward or backward of a peer; what it prepares happens once."""
        given = self.draw(*key)
        name = f"{who}_{back}"
        if name not in self._calls:
            fn, inputs = prepare(*given)
            self._calls[name] = (
                backward_of(fn, inputs) if back else torch.no_grad()(partial(fn, *inputs))
            )
        return self._calls[name]()


DRAWN = Drawn()
SLOW = ("flex_attention_padded", "unfused_compiled")
KINDS: tuple[tuple[str, Rotary], ...] = (("", "none"), ("_rote", "rote"))


def gpu_rows(case: AttentionCase, block_tokens: int, device: str) -> list[BenchCase]:
    key = (case, block_tokens, device)
    described = {
        "q_lengths": case.q_lengths,
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "head_width": case.head_width,
        "block_tokens": block_tokens,
    }
    costs = costs_of(case, block_tokens, 2)
    made = []
    for kind, rotary in KINDS:
        own = by_itself(block_tokens, rotary, "auto")
        peers = peers_of(case, block_tokens) if rotary == "none" else unfused(block_tokens)
        if case.name == WITH_SLOW_PEERS:
            peers["reference"] = by_itself(block_tokens, rotary, "reference")
        else:
            peers = {who: peer for who, peer in peers.items() if who not in SLOW}
        for back, direction in ((False, "forward"), (True, "backward")):
            name = case.name if block_tokens == BLOCK else f"{case.name}_by_{block_tokens}"
            made.append(
                BenchCase(
                    name=f"{name}{kind}_{direction}",
                    run=partial(DRAWN.call, key, f"own{kind}", own, back=back),
                    check=partial(gate, key, rotary) if not back else lambda: None,
                    cost=costs[back],
                    shapes=described | {"rotary": rotary},
                    dtype="bfloat16",
                    peers={
                        who: partial(DRAWN.call, key, f"{who}{kind}", peer, back=back)
                        for who, peer in peers.items()
                    },
                )
            )
    return made


def by_itself(block_tokens: int, rotary: Rotary, impl: Impl) -> Fn:
    def prepare(q: Tensor, k: Tensor, v: Tensor, layout: Layout, _cut: Layout, gap: Tensor) -> Any:
        fn = partial(
            block_attention,
            block_tokens=block_tokens,
            rotary=rotary,
            gap_seconds_T=gap if rotary == "rote" else None,
            visible_pairs=0,
            impl=impl,
        )
        return fn, (q, k, v, layout)

    return prepare


def unfused(block_tokens: int) -> dict[str, Fn]:
    """Return the peers that rotate first; their angles are a part of what is timed."""

    def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, gap: Tensor) -> Tensor:
        place = positions(layout.offsets_O, q.shape[0])
        angles = rote_angles(place, gap, q.shape[2])
        q, k = apply_rotary(q, *angles), apply_rotary(k, *angles)
        return block_attention(q, k, v, layout, block_tokens=block_tokens, visible_pairs=0)

    def prepare(fn: Fn) -> Fn:
        return lambda q, k, v, layout, _cut, gap: (fn, (q, k, v, layout, gap))

    return {"unfused": prepare(attend), "unfused_compiled": prepare(torch.compile(attend))}


def peers_of(case: AttentionCase, block_tokens: int) -> dict[str, Fn]:
    def on_blocks(attend: Fn) -> Fn:
        return lambda q, k, v, _layout, cut, _gap: (attend, (q, k, v, cut, cut))

    def flex(q: Tensor, k: Tensor, v: Tensor, _layout: Layout, cut: Layout, _gap: Tensor) -> Any:
        padded = [padded_blocks(x.detach(), cut, block_tokens).requires_grad_() for x in (q, k, v)]
        lengths = cut.lengths.to(q.device)
        attention = importlib.import_module("torch.nn.attention.flex_attention")

        def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
            def visible(score: Tensor, b: Tensor, _h: Tensor, _q: Tensor, key: Tensor) -> Tensor:
                return torch.where(key < lengths[b], score, -torch.inf)

            return attention.flex_attention(q, k, v, score_mod=visible)

        compiled = torch.compile(attend)
        # Blocks times heads are a dim of its grid, of which CUDA takes 65,535.
        most = 65_535 // case.heads

        def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            return tuple(
                compiled(*parts)
                for parts in zip(*(x.split(most) for x in (q, k, v, lengths)), strict=True)
            )

        return run, padded

    blocks = replace(case, q_lengths=tuple(blocks_of(case.q_lengths, block_tokens)))
    return {
        **{who: on_blocks(peer) for who, peer in gpu_peers(blocks).items()},
        "jagged_flash_attention": on_blocks(partial(jagged_flash_attention, visible_pairs=0)),
        "flex_attention_padded": flex,
    }


def padded_blocks(x: Tensor, cut: Layout, block_tokens: int) -> Tensor:
    """Return (blocks, heads, block_tokens, width), zeros behind the end of a block."""
    place = torch.arange(block_tokens, device=x.device)
    row = cut.offsets_O[:-1, None] + place
    used = place < cut.offsets_O.diff()[:, None]
    padded = x[row.clamp(max=x.shape[0] - 1)] * used[:, :, None, None]
    return padded.transpose(1, 2).contiguous()


def gate(key: tuple[AttentionCase, int, str], rotary: Rotary) -> None:
    """Compare first, middle and last sequence, forward and backward, with the loop.

    The loop over all of a case in fp64 would take longer than everything else here together.
    """
    case, block_tokens, device = key
    given = DRAWN.draw(*key)
    q, k, v, layout, _, gap = given
    fn, inputs = by_itself(block_tokens, rotary, "auto")(*given)
    out = fn(*inputs)
    upstream = torch.randn_like(out)
    results = (out.detach(), *torch.autograd.grad(out, (q, k, v), upstream))
    ends = layout.lengths.cumsum(0).tolist()
    loop = as_sequences(loop_over(softmax_rows, (None, None)), block_tokens)
    for b in sorted({0, len(ends) // 2, len(ends) - 1}):
        part = slice(ends[b] - case.q_lengths[b], ends[b])
        alone = Layout.from_lengths([case.q_lengths[b]], device=device)
        found = []
        for dtype in (q.dtype, torch.float64):
            leaves = [x[part].detach().to(dtype).requires_grad_() for x in (q, k, v)]
            turned = leaves
            if rotary == "rote":
                place = torch.arange(case.q_lengths[b], device=device) % block_tokens
                angles = rote_angles(place, gap[part], q.shape[2])
                turned = [*(apply_rotary(x, *angles) for x in leaves[:2]), leaves[2]]
            expected = loop(*turned, alone)
            gradients = torch.autograd.grad(expected, leaves, upstream[part].to(dtype))
            found.append((expected.detach(), *gradients))
        for name, mine, low, exact in zip(
            ("out", "grad_q", "grad_k", "grad_v"), results, *found, strict=True
        ):
            check_budget(mine[part], low, exact, what=f"{case.name}, sequence {b}, {name}")


if __name__ == "__main__":
    run_script("block_attention", groups_of)
