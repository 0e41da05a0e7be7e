"""Pooling by more seeds than a program can hold: they are repeated for every sequence.

Then it is attention of jagged batches with queries of one length, and its operators compute it; the
gradients of the repeated seeds are summed over the batch. With so many seeds the products take
longer than the copies. Heads that share keys but not their activation go this way too. On Hopper
the kernels read the same seeds for every sequence and need no copies, but for a backward whose bits
must be the same in every run.
"""

from functools import lru_cache

import torch
from torch import Tensor

from gem_attention.kernels.generalized_attention.op import generalized_attention_by_offsets
from gem_attention.kernels.jagged_flash_attention.op import jagged_flash_attention_by_offsets

_OPEN = (None, None)


def launch_forward(
    seeds_PHK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    k_offsets_O: Tensor,
    *,
    activations: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Pool; return out_BPHV, and lse_BPH, which has no elements but for softmax."""
    seeds, heads, _ = seeds_PHK.shape
    batch = k_offsets_O.shape[0] - 1
    q_offsets_O = _offsets(batch, seeds, k_offsets_O)
    if k_SGK.is_cuda:
        from gem_attention.hopper.launching import takes_repeated

        if takes_repeated(seeds_PHK, k_SGK, v_SGV, batch=batch):
            from gem_attention.hopper.forward import kernel_sm90

            out_THV, lse_TH = kernel_sm90.launch_forward(
                seeds_PHK,
                k_SGK,
                v_SGV,
                q_offsets_O,
                k_offsets_O,
                window=_OPEN,
                scale=scale,
                activations=activations,
                shared=True,
            )
            out_BPHV = out_THV.view(batch, seeds, heads, v_SGV.shape[2])
            return out_BPHV, lse_TH.view(len(lse_TH) // seeds, seeds, heads)
    operands = (_repeat(seeds_PHK, batch), k_SGK, v_SGV)
    rest = {"window": _OPEN, "scale": scale, "deterministic": False, "visible_pairs": 0}
    shape = (batch, seeds, heads)
    if activations != "softmax":
        out_THV = generalized_attention_by_offsets(
            *operands,
            (q_offsets_O, k_offsets_O),
            None,
            activations=activations,
            **rest,
            impl="triton",
        )
        lse_BPH = seeds_PHK.new_empty((0, seeds, heads), dtype=torch.float32)
        return out_THV.view(*shape, v_SGV.shape[2]), lse_BPH
    out_THV, lse_TH = jagged_flash_attention_by_offsets(
        *operands, (q_offsets_O, k_offsets_O), None, return_lse=True, **rest, impl="triton"
    )
    return out_THV.view(*shape, v_SGV.shape[2]), lse_TH.view(shape)


def launch_backward(  # noqa: PLR0913 - what the mathematics takes
    grad_out_BPHV: Tensor,
    seeds_PHK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    out_BPHV: Tensor,
    lse_BPH: Tensor,
    k_offsets_O: Tensor,
    *,
    activations: str,
    scale: float,
    deterministic: bool,
    grad_v_SGV: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the seeds, k and v; every row written.

    That of v may be written to ``grad_v_SGV``, and is the very same tensor then.
    """
    seeds, heads, width = seeds_PHK.shape
    batch = k_offsets_O.shape[0] - 1
    q_offsets_O = _offsets(batch, seeds, k_offsets_O)
    grad_out_THV = grad_out_BPHV.reshape(batch * seeds, heads, v_SGV.shape[2])
    if writes_into(seeds_PHK, k_SGK, v_SGV, batch, activations, deterministic=deterministic):
        from gem_attention.hopper.backward import kernel_sm90
        from gem_attention.portable.ragged.descriptor import packs

        softmax = activations == "softmax"
        return kernel_sm90.launch_backward(
            grad_out_THV,
            None,
            seeds_PHK,
            k_SGK,
            v_SGV,
            out_BPHV.reshape(grad_out_THV.shape) if softmax else None,
            lse_BPH.reshape(batch * seeds, heads) if softmax else None,
            q_offsets_O,
            k_offsets_O,
            window=_OPEN,
            scale=scale,
            activations=activations.split(",")[0],
            shared=True,
            grad_v_SGV=grad_v_SGV if grad_v_SGV is not None and packs(grad_v_SGV) else None,
        )
    operands = (_repeat(seeds_PHK, batch), k_SGK, v_SGV)
    places = (q_offsets_O, k_offsets_O, None, None)
    rest = (scale, deterministic, 0, "triton")
    if activations != "softmax":
        gradients = torch.ops.gem_attention.generalized_attention_backward(
            grad_out_THV, *operands, *places, activations, *_OPEN, *rest
        )
    else:
        gradients = torch.ops.gem_attention.jagged_flash_attention_backward(
            grad_out_THV,
            None,
            *operands,
            out_BPHV.reshape(grad_out_THV.shape),
            lse_BPH.reshape(batch * seeds, heads),
            *places,
            *_OPEN,
            *rest,
        )
    grad_q_THK, *others = gradients
    # Sums in float32, whatever the dtype.
    return grad_q_THK.view(batch, seeds, heads, width).sum(0), *others


def writes_into(
    seeds_PHK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    batch: int,
    activations: str,
    *,
    deterministic: bool,
) -> bool:
    """Say whether the backward is that of shared seeds.

    Args:
        seeds_PHK: queries of every sequence.
        k_SGK: keys.
        v_SGV: values.
        batch: number of sequences.
        activations: ``"softmax"`` or names.
        deterministic: whether the bits must be the same in every run.

    Returns:
        True for the Hopper kernels, which copy no seeds, and can write the gradient of v into a
        part of another tensor.
    """
    if not k_SGK.is_cuda or deterministic or len(set(activations.split(","))) > 1:
        return False
    from gem_attention.hopper.launching import takes_repeated

    return takes_repeated(seeds_PHK, k_SGK, v_SGV, batch=batch)


def _repeat(seeds_PHK: Tensor, batch: int) -> Tensor:
    seeds, heads, width = seeds_PHK.shape
    return seeds_PHK.expand(batch, seeds, heads, width).reshape(batch * seeds, heads, width)


def _offsets(batch: int, seeds: int, k_offsets_O: Tensor) -> Tensor:
    """Return the offsets of the repeated seeds, kept so that their tile list is kept as well."""
    place = (batch, seeds, k_offsets_O.dtype, k_offsets_O.device)
    if not k_offsets_O.is_cuda:
        return _make_offsets(*place, 0)
    if torch.cuda.is_current_stream_capturing():
        return _make_offsets.__wrapped__(*place, 0)  # memory of the graph ends with the graph
    return _make_offsets(*place, torch.cuda.current_stream(k_offsets_O.device).cuda_stream)


@lru_cache(maxsize=16)
def _make_offsets(
    batch: int,
    seeds: int,
    dtype: torch.dtype,
    device: torch.device,
    stream: int,
) -> Tensor:
    del stream  # what one stream has written is not ready on another
    return torch.arange(batch + 1, dtype=dtype, device=device) * seeds
