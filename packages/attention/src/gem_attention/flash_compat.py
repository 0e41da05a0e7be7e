"""flash-attention's varlen call, word for word, on ``jagged_flash_attention``.

Replace ``from flash_attn import flash_attn_varlen_func`` by an import from here. The arguments have
flash-attention's names and meaning; a value that is not built is refused. What differs:

- no ``max_seqlen`` is needed: the kernels follow the offsets on the device, and nothing waits;
- the logsumexp is differentiable, and -inf (not +inf) for a query that sees no key;
- rows behind the last offset get 0, and their gradients are 0.

Left out: everything of flash-attention that is not this call.
"""

import torch
from torch import Tensor

from gem_attention.checks import (
    check_autograd,
    check_dtypes,
    check_heads,
    check_layout,
    check_scale,
    check_window,
)
from gem_attention.kernels.jagged_flash_attention.op import (
    choose_implementation,
    jagged_flash_attention_by_offsets,
)
from gem_jagged.batch import Layout
from gem_opkit.dims import check_shapes
from gem_opkit.errors import DeviceError, DtypeError, ShapeError, UnsupportedError, refusal
from gem_opkit.impl import Impl

_NAME = "flash_attn_varlen_func"
_Sizes = tuple[int | None, int | None]


def flash_attn_varlen_func(  # noqa: PLR0913 - flash-attention's own signature
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,  # noqa: FBT001, FBT002
    window_size: _Sizes = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,  # noqa: FBT001, FBT002
    return_attn_probs: bool = False,  # noqa: FBT001, FBT002
    block_table: Tensor | None = None,
    *,
    visible_pairs: int | None = None,
    impl: Impl = "auto",
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Attend within each sequence of a packed batch.

    Args:
        q: queries (T, H, K), float32, bfloat16 or float16; views with contiguous rows are read in
            place, others copied.
        k: keys (S, G, K); query head h reads head h // (H / G).
        v: values (S, G, V).
        cu_seqlens_q: first query of each sequence and their number, int32 or int64, (B+1). Begins
            at 0 and never decreases; on a GPU the values are not read and so not checked: other
            ones give wrong rows, but touch no memory outside the operands.
        cu_seqlens_k: first key of each sequence, likewise.
        max_seqlen_q: not used.
        max_seqlen_k: not used.
        dropout_p: must be 0.
        softmax_scale: factor of the scores; None for 1/sqrt(K).
        causal: a query sees nothing after its own place, the last query standing at the last key;
            overrides the right side of ``window_size``.
        window_size: keys visible left and right of a query's place; -1 or None for all.
        softcap: must be 0.
        alibi_slopes: must be None.
        deterministic: the backward gives the same bits in every run.
        return_attn_probs: return (out, softmax_lse, S_dmask) as flash-attention does, where
            softmax_lse is (H, T) in float32 and S_dmask is empty, as it is without dropout.
        block_table: must be None.
        visible_pairs: pairs of query and key that see each other, for torch's FLOP counter;
            None counts 0, because lengths are on the device.
        impl: who computes it; see ``gem_opkit.impl``.

    Returns:
        out (T, H, V), or three tensors with ``return_attn_probs``.

    Raises:
        UnsupportedError: an argument that is not built, or operands that the kernels do not take.
        ShapeError, DtypeError, DeviceError: operands that do not fit together.

    Numerics: as ``jagged_flash_attention``.
    Cost: as ``jagged_flash_attention``, and a tile list once for each pair of offsets tensors.
    Source: Dao 2023 (arXiv:2307.08691) for the algorithm; the signature is flash-attention's.
    """
    _refuse_unbuilt(dropout_p, softcap, alibi_slopes, block_table)
    sizes = check_shapes(_NAME, q_THK=q, k_SGK=k, v_SGV=v)
    check_heads(_NAME, sizes)
    check_dtypes(_NAME, q=q, k=k, v=v)
    check_autograd(_NAME, q=q, k=k, v=v)
    _check_offsets(cu_seqlens_q, cu_seqlens_k, q)
    left, right = check_window(_NAME, window_size, name="window_size", everything=-1)
    chosen = choose_implementation(impl, q, v)
    lengths = None
    if chosen == "reference":
        lengths = _host_lengths(q, k, cu_seqlens_q, cu_seqlens_k)
    out_THV, lse_TH = jagged_flash_attention_by_offsets(
        q,
        k,
        v,
        (cu_seqlens_q, cu_seqlens_k),
        lengths,
        window=(left, 0 if causal else right),
        scale=check_scale(_NAME, softmax_scale, q.shape[2], name="softmax_scale"),
        return_lse=return_attn_probs,
        deterministic=deterministic,
        visible_pairs=visible_pairs or 0,
        impl=chosen,
    )
    if return_attn_probs:
        return out_THV, lse_TH.transpose(0, 1), out_THV.new_empty(0)
    return out_THV


def _refuse_unbuilt(
    dropout_p: float,
    softcap: float,
    alibi_slopes: Tensor | None,
    block_table: Tensor | None,
) -> None:
    for name, value, neutral, fix in (
        ("dropout_p", dropout_p, 0.0, "apply dropout to the output"),
        ("softcap", softcap, 0.0, "bound the scores by QK-norm"),
        ("alibi_slopes", alibi_slopes, None, "use rotary embeddings"),
        ("block_table", block_table, None, "gather the pages into packed keys and values"),
    ):
        if value is neutral or (neutral is not None and value == neutral):
            continue
        got = "a tensor" if isinstance(value, Tensor) else value
        raise UnsupportedError(refusal(_NAME, name, must=f"be {neutral}", got=got, fix=fix))


def _check_offsets(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, q: Tensor) -> None:
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(offsets, Tensor):
            raise DtypeError(
                refusal(
                    _NAME,
                    name,
                    must="be a tensor of int32 or int64",
                    got=type(offsets).__name__,
                    fix="put it on the device of q once a batch",
                )
            )
        if offsets.ndim != 1 or offsets.shape[0] == 0:
            raise ShapeError(
                refusal(
                    _NAME,
                    name,
                    must="have one dim of B + 1 offsets",
                    got=tuple(offsets.shape),
                    fix="offsets of an empty batch are [0]",
                )
            )
        if offsets.dtype not in (torch.int32, torch.int64):
            raise DtypeError(
                refusal(_NAME, name, must="be int32 or int64", got=offsets.dtype, fix="convert it")
            )
        if offsets.device != q.device:
            raise DeviceError(
                refusal(
                    _NAME, name, must=f"be on {q.device} like q", got=offsets.device, fix="move it"
                )
            )
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ShapeError(
            refusal(
                _NAME,
                "cu_seqlens_k",
                must=f"have the {cu_seqlens_q.shape[0] - 1} sequences of cu_seqlens_q",
                got=cu_seqlens_k.shape[0] - 1,
                fix="a sequence without keys has length 0",
            )
        )


def _host_lengths(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> tuple[Tensor, Tensor]:
    if q.device.type != "cpu":
        raise UnsupportedError(
            refusal(
                _NAME,
                "q",
                must="be float32, bfloat16 or float16 with widths of at most 256 on a GPU",
                got=f"{q.dtype}, K={q.shape[2]} for the reference, which needs host lengths",
                fix="use gem_attention.ops.jagged_flash_attention, whose layouts have them",
            )
        )
    if torch.compiler.is_compiling():
        return cu_seqlens_q.to(torch.int64).diff(), cu_seqlens_k.to(torch.int64).diff()
    layouts = []
    for name, tensor, offsets in (("q", q, cu_seqlens_q), ("k", k, cu_seqlens_k)):
        layout = Layout.from_offsets(offsets)
        check_layout(_NAME, tensor, layout, name=name, layout_name=f"cu_seqlens_{name}")
        layouts.append(layout.lengths)
    return layouts[0], layouts[1]
