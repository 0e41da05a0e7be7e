"""The mathematics of ``mx_attention``, forward and backward, in plain torch.

For each sequence and head, with Q(X; d) the numbers of X in MXFP8, in blocks of 32 along dim d::

    S = scale · log2(e) · Q(Q; K) Q(K; K)ᵀ    at the visible pairs, −∞ elsewhere
    M = ⌈max S⌉ a row     P' = 2^(S − M)      l = Σ P'      lse2 = M + log2 l
    out = Q(P'; keys) Q(V; keys) / l

    P = 2^(S − lse2)      D = rowsum(dO ∘ out)
    dV = Q(Pᵀ; queries) Q(dO; queries)        dP = Q(dO; V) Q(V; V)ᵀ
    dS = P ∘ (dP − D)
    dQ = scale · Q(dS; keys) Q(K; keys)       dK = scale · Q(dSᵀ; queries) Q(Q; queries)

All seven products are in MXFP8, each factor in blocks along the dim that its product sums over, all
elements E4M3. Blocks along tokens begin where the sequence begins; the last one is filled up with
zeros. Hidden pairs are zeros in a block. The backward takes Q as the identity.

M is a whole number, so that a kernel that sees keys tile by tile rebases its sums by powers of two,
which change no element of P', only the codes of scales.

With a seed dO and dS are rounded up or down by chance: the word of an element is Philox of its row
of the packed batch, its column within the sequence (of dO, within the head), its head and
which of the four roundings it is.

Sequences of similar length are padded to one length and computed together; what pads is zeros, as
the ragged blocks want it. Computes in fp32.

Source: Meta's GEM training article and its low-precision attention for which factors are in 8 bits;
Mishra et al. 2025 (arXiv:2506.08027) for E4M3 in gradients too; the rest is written out above.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gem_attention.tiles import Window
from gem_opkit.stochastic import philox_words
from gem_precision.codes import MAGNITUDE, bits_of, element_codes, largest_of_blocks, spread
from gem_precision.codes import scale_codes as codes_of_scales
from gem_precision.elements import BLOCK
from gem_precision.ops import MxMatrix, mx_dequantize

LOG2E = 1.4426950408889634
_BUDGET = 2**22  # scores of all heads that are held at once
_KEY_DIM, _QUERY_DIM, _WIDTH_DIM, _TOKEN_DIM = range(4)  # which rounding draws words


@dataclass(frozen=True, slots=True)
class _Part:
    """Sequences that are computed together.

    Attributes:
        q_rows: row of each query of the packed batch, (b, N), and where there is one.
        q_real: whether there is one, (b, N).
        k_rows: row of each key.
        k_real: whether there is one.
        seen: which keys a query sees, (b, N, M).
    """

    q_rows: Tensor
    q_real: Tensor
    k_rows: Tensor
    k_real: Tensor
    seen: Tensor


def mx_attention_reference(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    q_lengths_B: Tensor,
    k_lengths_B: Tensor,
    window: Window,
    scale: float,
    *,
    scaling: str,
) -> tuple[Tensor, Tensor]:
    """Attend within each sequence.

    Args:
        q_THK: queries.
        k_SGK: keys.
        v_SGV: values.
        q_lengths_B: queries of each sequence, int64 on the CPU.
        k_lengths_B: keys of each sequence, int64 on the CPU.
        window: keys visible left and right of a query's place; None for all.
        scale: factor of the scores.
        scaling: rule of the scales.

    Returns:
        out_THV in the dtype of q, and lse2_TH in fp32: the logsumexp in powers of two.
    """
    heads = q_THK.shape[1]
    out = q_THK.new_zeros((q_THK.shape[0], heads, v_SGV.shape[2]), dtype=torch.float32)
    lse2 = torch.full(out.shape[:2], -math.inf, device=out.device)
    for part in _parts(q_lengths_B, k_lengths_B, heads, window, q_THK.device):
        v = _rounded(_read(v_SGV, part.k_rows, part.k_real, heads).mT, scaling).mT
        score = _scores(q_THK, k_SGK, part, scale, scaling)
        top = score.amax(-1, keepdim=True).ceil()
        top = torch.where(top == -math.inf, 0.0, top)
        p = torch.exp2(score - top)
        total = p.sum(-1, keepdim=True)
        sees = part.seen.any(-1)[:, None, :, None]
        made = (_rounded(p, scaling) @ v) / torch.where(sees, total, 1.0)
        _write(out, part.q_rows, part.q_real, made)
        lse2_part = torch.where(sees, top + total.log2(), -math.inf)
        _write(lse2, part.q_rows, part.q_real, lse2_part[..., 0])
    return out.to(q_THK.dtype), lse2


def mx_attention_backward_reference(  # noqa: PLR0913 - what the mathematics takes
    grad_out_THV: Tensor,
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    out_THV: Tensor,
    lse2_TH: Tensor,
    q_lengths_B: Tensor,
    k_lengths_B: Tensor,
    window: Window,
    scale: float,
    *,
    scaling: str,
    seed: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate ``mx_attention_reference``.

    Args:
        grad_out_THV: gradient of out.
        q_THK: as in the forward.
        k_SGK: as in the forward.
        v_SGV: as in the forward.
        out_THV: result of the forward.
        lse2_TH: result of the forward.
        q_lengths_B: as in the forward.
        k_lengths_B: as in the forward.
        window: as in the forward.
        scale: as in the forward.
        scaling: as in the forward.
        seed: of the rounding by chance of gradients; None for rounding to the nearest.

    Returns:
        gradients of q, k and v in their dtypes.
    """
    heads, groups = q_THK.shape[1], k_SGK.shape[1]
    grads = [torch.zeros(x.shape, device=x.device) for x in (q_THK, k_SGK, v_SGV)]
    delta_TH = (grad_out_THV.float() * out_THV.float()).sum(-1)
    h = torch.arange(heads, device=q_THK.device)[:, None, None]
    for part in _parts(q_lengths_B, k_lengths_B, heads, window, q_THK.device):
        q = _read(q_THK, part.q_rows, part.q_real, heads)
        k = _read(k_SGK, part.k_rows, part.k_real, heads)
        v = _read(v_SGV, part.k_rows, part.k_real, heads)
        grad = _read(grad_out_THV, part.q_rows, part.q_real, heads)
        q_row, k_row = (rows[:, None, :, None] for rows in (part.q_rows, part.k_rows))
        queries, keys, width = (
            torch.arange(n, device=q.device) for n in (q.shape[2], k.shape[2], v.shape[3])
        )
        draws = {
            _KEY_DIM: (q_row, keys),
            _QUERY_DIM: (k_row, queries),
            _WIDTH_DIM: (q_row, width),
            _TOKEN_DIM: (q_row, width),
        }

        def words(which: int, draws: dict[int, tuple[Tensor, Tensor]] = draws) -> Tensor | None:
            return None if seed is None else _words(seed, *draws[which], h, which)

        lse2 = _read(lse2_TH[..., None], part.q_rows, part.q_real, heads)
        delta = _read(delta_TH[..., None], part.q_rows, part.q_real, heads)
        score = _scores(q_THK, k_SGK, part, scale, scaling)
        p = torch.where(part.seen[:, None], torch.exp2(score - lse2), 0.0)
        by_token = _rounded(grad.mT, scaling, _turned(words(_TOKEN_DIM))).mT
        grad_v = _rounded(p.mT, scaling) @ by_token
        grad_p = _rounded(grad, scaling, words(_WIDTH_DIM)) @ _rounded(v, scaling).mT
        grad_s = p * (grad_p - delta)
        grad_q = scale * _rounded(grad_s, scaling, words(_KEY_DIM)) @ _rounded(k.mT, scaling).mT
        grad_k = (
            scale * _rounded(grad_s.mT, scaling, words(_QUERY_DIM)) @ (_rounded(q.mT, scaling).mT)
        )
        _write(grads[0], part.q_rows, part.q_real, grad_q)
        for into, made in ((grads[1], grad_k), (grads[2], grad_v)):
            of_groups = made.unflatten(1, (groups, heads // groups)).sum(2)
            _write(into, part.k_rows, part.k_real, of_groups)
    made = tuple(g.to(x.dtype) for g, x in zip(grads, (q_THK, k_SGK, v_SGV), strict=True))
    return made[0], made[1], made[2]


def _parts(
    q_lengths_B: Tensor, k_lengths_B: Tensor, heads: int, window: Window, device: torch.device
) -> Iterator[_Part]:
    """Cut a batch into parts of similar sequences, padded to one length."""
    q_lengths, k_lengths = q_lengths_B.tolist(), k_lengths_B.tolist()
    order = [b for b in range(len(q_lengths)) if q_lengths[b] or k_lengths[b]]
    order.sort(key=lambda b: (q_lengths[b], k_lengths[b]))
    q_begins = [0, *torch.tensor(q_lengths).cumsum(0).tolist()] if q_lengths else [0]
    k_begins = [0, *torch.tensor(k_lengths).cumsum(0).tolist()] if k_lengths else [0]
    while order:
        picked, longest = [], (1, 1)
        for b in order:
            new = (max(longest[0], q_lengths[b]), max(longest[1], k_lengths[b]))
            if picked and (len(picked) + 1) * heads * new[0] * new[1] > _BUDGET:
                break
            picked, longest = [*picked, b], new
        order = order[len(picked) :]
        q_rows, q_real = _rows([q_begins[b] for b in picked], [q_lengths[b] for b in picked])
        k_rows, k_real = _rows([k_begins[b] for b in picked], [k_lengths[b] for b in picked])
        place = torch.arange(q_real.shape[1])[None, :, None]
        place = place + torch.tensor([k_lengths[b] - q_lengths[b] for b in picked])[:, None, None]
        key = torch.arange(k_real.shape[1])[None, None, :]
        seen = q_real[:, :, None] & k_real[:, None, :]
        left, right = window
        if left is not None:
            seen = seen & (key >= place - left)
        if right is not None:
            seen = seen & (key <= place + right)
        yield _Part(*(t.to(device) for t in (q_rows, q_real, k_rows, k_real, seen)))


def _rows(begins: list[int], lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Rows of padded sequences, and which of them are there; at least one column."""
    place = torch.arange(max(1, *lengths))[None, :]
    real = place < torch.tensor(lengths)[:, None]
    return torch.where(real, place + torch.tensor(begins)[:, None], 0), real


def _read(x: Tensor, rows: Tensor, real: Tensor, heads: int) -> Tensor:
    """Gather padded rows as (b, heads, N, width) of fp32, zeros where there is none."""
    if x.shape[0] == 0:
        x = x.new_zeros((1, *x.shape[1:]))
    gathered = torch.where(real[..., None, None], x[rows].float(), 0.0)
    return gathered.repeat_interleave(heads // x.shape[1], dim=2).transpose(1, 2)


def _write(into: Tensor, rows: Tensor, real: Tensor, made: Tensor) -> None:
    """Scatter (b, heads, N, ...) to the rows that are there."""
    into[rows[real]] = made.transpose(1, 2)[real]


def _scores(
    q_THK: Tensor, k_SGK: Tensor, part: _Part, scale: float, scaling: str
) -> Tensor:  # fmt: skip
    heads = q_THK.shape[1]
    q = _rounded(_read(q_THK, part.q_rows, part.q_real, heads), scaling)
    k = _rounded(_read(k_SGK, part.k_rows, part.k_real, heads), scaling)
    return (q @ k.mT * (scale * LOG2E)).masked_fill(~part.seen[:, None], -math.inf)


def _rounded(x: Tensor, scaling: str, words: Tensor | None = None) -> Tensor:
    """Return the numbers of MXFP8, in blocks along the last dim."""
    x_TD = x.reshape(-1, x.shape[-1]).float()
    bits_TD = bits_of(x_TD)
    scales = codes_of_scales(largest_of_blocks(bits_TD & MAGNITUDE, 1, BLOCK), scaling, "e4m3")
    given = None if words is None else words.expand(x.shape).reshape(x_TD.shape)
    elements_TD = element_codes(bits_TD, spread(scales, x_TD, 1, BLOCK), "e4m3", given)
    made = MxMatrix(elements_TD.to(torch.uint8), scales.to(torch.uint8), "e4m3", "rows")
    return mx_dequantize(made, impl="reference").view(x.shape)


def _words(seed: int, row: Tensor, column: Tensor, h: Tensor, which: int) -> Tensor:
    """Draw a word for each element, (b, heads, rows, columns)."""
    four = philox_words(seed, row, h, column // 4, torch.full_like(column, which))
    index = (column % 4).expand(four[0].shape)[None]
    return torch.stack(four).gather(0, index)[0]


def _turned(words: Tensor | None) -> Tensor | None:
    return None if words is None else words.mT
