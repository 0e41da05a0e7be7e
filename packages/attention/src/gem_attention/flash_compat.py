"""flash-attention's varlen call, word for word, and calls of its kind for the other operators.

Replace ``from flash_attn import flash_attn_varlen_func`` by an import from here. The arguments have
flash-attention's names and meaning; a value that is not built is refused. What differs:

- no ``max_seqlen`` is needed: the kernels follow the offsets on the device, and nothing waits;
- the logsumexp is differentiable, and -inf (not +inf) for a query that sees no key;
- rows behind the last offset get 0, and their gradients are 0.

``generalized_attention_varlen_func`` is the same for attention without softmax, and
``pooled_attention_varlen_func`` for queries that all sequences share; flash-attention has no such
calls.

Left out: everything of flash-attention that is not this call.
"""

from typing import Literal

import torch
from torch import Tensor

from gem_attention.checks import (
    check_activation,
    check_dtypes,
    check_heads,
    check_layout,
    check_scale,
    check_window,
)
from gem_attention.choosing import choose_implementation
from gem_attention.contract import GdpaActivation
from gem_attention.kernels.generalized_attention.op import generalized_attention_by_offsets
from gem_attention.kernels.jagged_flash_attention.op import jagged_flash_attention_by_offsets
from gem_attention.kernels.pooled_attention.op import pooled_attention_by_offsets
from gem_jagged.batch import Layout
from gem_opkit.derivatives import check_autograd
from gem_opkit.dims import check_shapes
from gem_opkit.errors import DeviceError, DtypeError, ShapeError, UnsupportedError, refusal
from gem_opkit.impl import Impl

_NAME = "flash_attn_varlen_func"
_GENERALIZED = "generalized_attention_varlen_func"
_POOLED = "pooled_attention_varlen_func"
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
    _check_offsets(_NAME, cu_seqlens_q, cu_seqlens_k, q)
    left, right = check_window(_NAME, window_size, name="window_size", everything=-1)
    chosen = choose_implementation(_NAME, impl, q, v)
    lengths = None
    if chosen == "reference":
        lengths = _host_lengths(_NAME, q, k, cu_seqlens_q, cu_seqlens_k)
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


def generalized_attention_varlen_func(  # noqa: PLR0913 - the signature of the call beside it
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    activation: GdpaActivation | tuple[GdpaActivation, ...] = "gelu",
    scale: float | None = None,
    window_size: _Sizes = (-1, -1),
    deterministic: bool = False,
    visible_pairs: int | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Attend within each sequence with an elementwise activation in place of softmax (GDPA).

    Args:
        q: as in ``flash_attn_varlen_func``.
        k: as there.
        v: as there.
        cu_seqlens_q: as there.
        cu_seqlens_k: as there.
        max_seqlen_q: not used.
        max_seqlen_k: not used.
        activation: name of an activation, or a tuple with one for each query head; see
            ``gem_attention.ops.generalized_attention``.
        scale: factor of the scores; None for 1/sqrt(K).
        window_size: keys visible left and right of a query's place; -1 or None for all.
        deterministic: the backward gives the same bits in every run.
        visible_pairs: as in ``flash_attn_varlen_func``.
        impl: who computes it; see ``gem_opkit.impl``.

    Returns:
        out (T, H, V); 0 for a query that sees no key.

    Raises:
        UnsupportedError: an unknown activation, or operands that the kernels do not take.
        ShapeError, DtypeError, DeviceError: operands that do not fit together.
        ConfigError: a scale that is not finite.

    Numerics: as ``generalized_attention``.
    Cost: as ``generalized_attention``, and a tile list once for each pair of offsets tensors.
    Source: Meta's GEM kernels article for the operation; the arguments are flash-attention's.
    """
    sizes = check_shapes(_GENERALIZED, q_THK=q, k_SGK=k, v_SGV=v)
    check_heads(_GENERALIZED, sizes)
    check_dtypes(_GENERALIZED, q=q, k=k, v=v)
    check_autograd(_GENERALIZED, q=q, k=k, v=v)
    _check_offsets(_GENERALIZED, cu_seqlens_q, cu_seqlens_k, q)
    activations = check_activation(_GENERALIZED, activation, q.shape[1])
    window = check_window(_GENERALIZED, window_size, name="window_size", everything=-1)
    chosen = choose_implementation(_GENERALIZED, impl, q, v)
    lengths = None
    if chosen == "reference":
        lengths = _host_lengths(_GENERALIZED, q, k, cu_seqlens_q, cu_seqlens_k)
    return generalized_attention_by_offsets(
        q,
        k,
        v,
        (cu_seqlens_q, cu_seqlens_k),
        lengths,
        activations=activations,
        window=window,
        scale=check_scale(_GENERALIZED, scale, q.shape[2]),
        deterministic=deterministic,
        visible_pairs=visible_pairs or 0,
        impl=chosen,
    )


def pooled_attention_varlen_func(  # noqa: PLR0913 - the signature of the calls beside it
    seeds_PHK: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_k: Tensor,
    max_seqlen_k: int | None = None,
    activation: Literal["softmax"] | GdpaActivation | tuple[GdpaActivation, ...] = "softmax",
    softmax_scale: float | None = None,
    deterministic: bool = False,
    visible_pairs: int | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Pool each sequence of a packed batch with the same queries, the seeds.

    Args:
        seeds_PHK: queries of every sequence.
        k: as in ``flash_attn_varlen_func``.
        v: as there.
        cu_seqlens_k: as there.
        max_seqlen_k: not used.
        activation: softmax, or what ``generalized_attention_varlen_func`` takes.
        softmax_scale: factor of the scores, also of an activation; None for 1/sqrt(K).
        deterministic: the backward gives the same bits in every run.
        visible_pairs: keys of all sequences times the seeds, for torch's FLOP counter; None counts
            0, because lengths are on the device.
        impl: who computes it; see ``gem_opkit.impl``.

    Returns:
        out (B, P, H, V); 0 for a sequence without keys.

    Raises:
        UnsupportedError: an unknown activation, or operands that the kernels do not take.
        ShapeError, DtypeError, DeviceError: operands that do not fit together.
        ConfigError: a scale that is not finite.

    Numerics: as ``pooled_attention``.
    Cost: as ``pooled_attention``, and a tile list once for each offsets tensor.
    Source: Lee et al. 2019 (arXiv:1810.00825); the arguments are flash-attention's.
    """
    sizes = check_shapes(_POOLED, seeds_PHK=seeds_PHK, k_SGK=k, v_SGV=v)
    check_heads(_POOLED, sizes)
    check_dtypes(_POOLED, seeds_PHK=seeds_PHK, k=k, v=v)
    check_autograd(_POOLED, seeds_PHK=seeds_PHK, k=k, v=v)
    _check_each(_POOLED, "k", k, cu_seqlens_k=cu_seqlens_k)
    activations = "softmax"
    if activation != "softmax":
        activations = check_activation(_POOLED, activation, seeds_PHK.shape[1])
    chosen = choose_implementation(_POOLED, impl, seeds_PHK, v)
    lengths = None
    if chosen == "reference":
        lengths = _host_length(_POOLED, "k", k, cu_seqlens_k)
    return pooled_attention_by_offsets(
        seeds_PHK,
        k,
        v,
        cu_seqlens_k,
        lengths,
        activations=activations,
        scale=check_scale(_POOLED, softmax_scale, seeds_PHK.shape[2], name="softmax_scale"),
        deterministic=deterministic,
        k_tokens=(visible_pairs or 0) // max(seeds_PHK.shape[0], 1),
        impl=chosen,
    )


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


def _check_offsets(op: str, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, q: Tensor) -> None:
    _check_each(op, "q", q, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ShapeError(
            refusal(
                op,
                "cu_seqlens_k",
                must=f"have the {cu_seqlens_q.shape[0] - 1} sequences of cu_seqlens_q",
                got=cu_seqlens_k.shape[0] - 1,
                fix="a sequence without keys has length 0",
            )
        )


def _check_each(op: str, tensor_name: str, tensor: Tensor, **given: Tensor) -> None:
    for name, offsets in given.items():
        if not isinstance(offsets, Tensor):
            raise DtypeError(
                refusal(
                    op,
                    name,
                    must="be a tensor of int32 or int64",
                    got=type(offsets).__name__,
                    fix=f"put it on the device of {tensor_name} once a batch",
                )
            )
        if offsets.ndim != 1 or offsets.shape[0] == 0:
            raise ShapeError(
                refusal(
                    op,
                    name,
                    must="have one dim of B + 1 offsets",
                    got=tuple(offsets.shape),
                    fix="offsets of an empty batch are [0]",
                )
            )
        if offsets.dtype not in (torch.int32, torch.int64):
            raise DtypeError(
                refusal(op, name, must="be int32 or int64", got=offsets.dtype, fix="convert it")
            )
        if offsets.device != tensor.device:
            raise DeviceError(
                refusal(
                    op,
                    name,
                    must=f"be on {tensor.device} like {tensor_name}",
                    got=offsets.device,
                    fix="move it",
                )
            )


def _host_lengths(
    op: str, q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> tuple[Tensor, Tensor]:
    return _host_length(op, "q", q, cu_seqlens_q), _host_length(op, "k", k, cu_seqlens_k)


def _host_length(op: str, name: str, tensor: Tensor, offsets: Tensor) -> Tensor:
    if tensor.device.type != "cpu":
        raise UnsupportedError(
            refusal(
                op,
                name,
                must="be float32, bfloat16 or float16 with widths of at most 256 on a GPU",
                got=f"{tensor.dtype}, width {tensor.shape[2]} for the reference, which needs "
                "host lengths",
                fix="use the operator in gem_attention.ops, whose layouts have them",
            )
        )
    if torch.compiler.is_compiling():
        return offsets.to(torch.int64).diff()
    layout = Layout.from_offsets(offsets)
    check_layout(op, tensor, layout, name=name, layout_name=f"cu_seqlens_{name}")
    return layout.lengths
