"""Weights that FSDP gathers in 8 bits: each rank quantises its shard before the all-gather.

``EightBitGather`` wraps the parameter that FSDP2 shards. FSDP then asks the shard of each rank for
what is to be sent (bytes of E4M3 in squares of 128x128, and their scales) and for the weight that
came. What an optimizer sees is the shard in its own precision. The weight that came holds the
numbers of block FP8: a product in ``fp8_block`` quantises it to the same numbers again, where
shards are whole blocks. It knows no mesh.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gem_opkit.errors import ConfigError, UnsupportedError, refusal
from gem_precision.contract import LinearFormats
from gem_precision.elements import WIDE_BLOCK
from gem_precision.ops import BlockMatrix, block_dequantize_into, block_quantize_untraced

_log = logging.getLogger("gem_precision")

_aten = torch.ops.aten
# What FSDP and optimizers make of a parameter that has to stay one of its kind.
_KEEPING = {
    _aten.detach.default,
    _aten.clone.default,
    _aten.copy_.default,
    _aten.view.default,
    _aten.as_strided.default,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten._to_copy.default,
    _aten._pin_memory.default,
}


class EightBitGather(Tensor):
    """A weight, or a shard of one, that FSDP2 sends in block FP8.

    Args:
        held: a matrix, fp32 or bf16; the numbers that are trained.
    """

    held: Tensor

    @staticmethod
    def __new__(cls: type["EightBitGather"], held: Tensor) -> "EightBitGather":
        """Make the wrapper, with the size and dtype of what it holds."""
        return Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=held.device,
            requires_grad=held.requires_grad,
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Show what it holds."""
        return f"EightBitGather({self.held!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Name the inner tensor, for torch."""
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], meta: None, outer_size: Any, outer_stride: Any
    ) -> "EightBitGather":
        """Make it again from its inner tensor."""
        return EightBitGather(inner["held"])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute on what is held; keep the kind where somebody goes on with the parameter."""
        plain = pytree.tree_map_only(cls, lambda t: t.held, (args, kwargs or {}))
        made = func(*plain[0], **plain[1])
        if func is _aten.copy_.default:
            return args[0]
        return pytree.tree_map_only(Tensor, cls, made) if func in _KEEPING else made

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """Quantise the shard: what FSDP sends."""
        rows, parts = outer_size[0], mesh.size()
        if rows % parts:
            raise UnsupportedError(
                refusal(
                    "EightBitGather",
                    "weight",
                    must=f"have rows that are a multiple of the {parts} ranks that share it",
                    got=rows,
                    fix="gather this one in bf16",
                )
            )
        matrix = block_quantize_untraced(self.held)
        return (matrix.elements_TD, matrix.scales), None

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype | None,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Decode the shards of all ranks: the weight that the layer computes with."""
        elements, scales = outputs
        rows = self.held.shape[0]
        dtype = param_dtype or self.held.dtype
        weight = elements.new_empty(elements.shape, dtype=dtype) if out is None else out.data
        if rows % WIDE_BLOCK == 0:  # whole blocks follow each other: one matrix
            block_dequantize_into(weight, BlockMatrix(elements, scales, "128x128"))
        else:
            strips = -(-rows // WIDE_BLOCK)
            parts = zip(elements.split(rows), scales.split(strips), strict=True)
            for part, (e, s) in zip(weight.split(rows), parts, strict=True):
                block_dequantize_into(part, BlockMatrix(e, s, "128x128"))
        return None if out is not None else (weight, (weight,))


def gather_in_8_bits(layer: nn.Linear) -> None:
    """Let FSDP2 gather a layer's weight in 8 bits; call it before ``fully_shard``.

    Args:
        layer: a linear layer, which is changed.

    Raises:
        ConfigError: its weight is no plain parameter any more. A gather raises UnsupportedError
            where the ranks cannot share its rows evenly.

    Numerics: the forward and backward pass see the weight as block FP8 holds it, rounded once a
        gather from the shard of its own precision.
    Cost: a byte an element on the wire, and four a block of 128x128, instead of two in bf16.
    """
    if type(layer.weight) is not nn.Parameter:
        raise ConfigError(
            refusal(
                "gather_in_8_bits",
                "layer",
                must="have a plain weight",
                got=type(layer.weight).__name__,
                fix="call it once, before the layer is sharded",
            )
        )
    layer.weight = nn.Parameter(
        EightBitGather(layer.weight.detach()), requires_grad=layer.weight.requires_grad
    )


@dataclass(frozen=True, slots=True)
class GatheredLayers:
    """Which weights travel in 8 bits.

    Attributes:
        names: of the layers.
        kept: name of each other layer in ``fp8_block`` -> why its weight does not.
    """

    names: tuple[str, ...]
    kept: Mapping[str, str]

    def told(self) -> str:
        """One line: how many weights, and why others do not."""
        reasons: dict[str, int] = {}
        for reason in self.kept.values():
            reasons[reason] = reasons.get(reason, 0) + 1
        parts = [f"{len(self.names)} weights gathered in 8 bits"]
        return "; ".join([*parts, *(f"{n} not: {why}" for why, n in reasons.items())])


def gather_layers_in_8_bits(
    model: nn.Module, formats: Mapping[str, LinearFormats], *, parts: Callable[[str, int], int]
) -> GatheredLayers:
    """Let FSDP2 gather the weights of a recipe's layers in 8 bits; call it before ``fully_shard``.

    Args:
        model: changed in place.
        formats: name of a layer -> formats of its products, as ``convert_layers`` gives them.
        parts: how many ranks share a weight, by its layer's name and its elements; 1: nobody.

    Returns:
        what became of each layer in ``fp8_block``; one line of it is logged.

    Raises:
        ConfigError: a weight is no plain parameter any more.

    Numerics: as `gather_in_8_bits`. Each part is whole blocks of 128x128, so that quantising before
        the gather gives the bytes of quantising after it.
    """
    names: list[str] = []
    kept: dict[str, str] = {}
    readers = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for name, own in formats.items():
        if "fp8_block" not in (own.forward, own.input_gradient):
            continue
        layer = cast(nn.Linear, model.get_submodule(name))
        ranks = parts(name, layer.weight.numel())
        if own.forward != own.input_gradient:
            kept[name] = f"its other product is in {own.forward} or {own.input_gradient}"
        elif readers[id(layer.weight)] > 1:
            kept[name] = "it is another layer's weight too"
        elif ranks == 1:
            kept[name] = "whole on every rank"
        elif layer.out_features % (ranks * WIDE_BLOCK):
            kept[name] = f"no whole blocks of {WIDE_BLOCK} on each of {ranks} ranks"
        else:
            gather_in_8_bits(layer)
            names.append(name)
    done = GatheredLayers(tuple(names), kept)
    _log.info("precision: %s", done.told())
    return done


def trained_numbers(tensor: Tensor) -> Tensor:
    """View the numbers that are trained of what is gathered in 8 bits, in the same memory.

    Args:
        tensor: any; a DTensor may hold a part that is gathered in 8 bits.

    Returns:
        a plain tensor, or a DTensor of one; what is not gathered so comes back itself.
    """
    if isinstance(tensor, EightBitGather):
        return tensor.held
    if isinstance(tensor, DTensor) and isinstance(tensor._local_tensor, EightBitGather):
        return DTensor.from_local(
            tensor._local_tensor.held.detach(),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return tensor
