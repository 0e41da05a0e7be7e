"""A precision recipe applied to the attention of a model: which layers multiply in MXFP8.

A layer keeps its weights and its name; only the products of its attention change. Left out: the
layers' linear maps (``gem_precision.recipes``), and attention that has no such products: in blocks,
without softmax, by seeds.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from gem_attention.kernels.mx_attention.op import mx_attention_way
from gem_attention.layers import CrossAttention, GdpaPffn, SelfAttention
from gem_attention.pooling import PooledAttention
from gem_precision.contract import AttentionFormat, PrecisionRecipe
from gem_precision.elements import BLOCK
from gem_precision.recipes import rounding_of
from gem_precision.rounding import NEAREST

_log = logging.getLogger("gem_attention")


@dataclass(frozen=True, slots=True)
class AttentionConversion:
    """What became of the attention of a model.

    Attributes:
        formats: name of each layer whose attention multiplies in 8 bits -> its format.
        kept: name of each other attention layer -> why it stayed as it was.
        way: how the device computes them: ``"native"``, ``"emulated"`` or ``"reference"``.
    """

    formats: Mapping[str, AttentionFormat]
    kept: Mapping[str, str]
    way: str

    def told(self) -> str:
        """One line: how many layers compute in which format, and why others do not."""
        number = len(self.formats) + len(self.kept)
        kinds: dict[str, int] = {}
        for name in self.formats.values():
            kinds[name] = kinds.get(name, 0) + 1
        reasons: dict[str, int] = {}
        for reason in self.kept.values():
            reasons[reason] = reasons.get(reason, 0) + 1
        parts = [f"{n} of {number} attention layers in {kind}" for kind, n in kinds.items()]
        if parts and self.way != "native":
            parts.append(f"{self.way} here: the right numbers, no gain of speed")
        parts = parts or [f"none of {number} attention layers below bf16"]
        return "; ".join([*parts, *(f"{n} in bf16: {why}" for why, n in reasons.items())])


def convert_attention(
    model: nn.Module,
    recipe: PrecisionRecipe,
    *,
    device: torch.device,
    escapes: Sequence[str] = (),
) -> AttentionConversion:
    """Give the attention layers of a model the format that a recipe names for them.

    Args:
        model: changed in place: the ``product_format`` of its ``SelfAttention`` and
            ``CrossAttention`` layers with softmax. A recipe without a format for attention takes
            every layer back to what it computes in by itself.
        recipe: what is wanted.
        device: where the model will run.
        escapes: prefixes of names that stay in bf16 where the recipe names none itself.

    Returns:
        what became of each layer; one line of it is logged where the recipe names a format.
    """
    if recipe.bf16_escapes is not None:
        escapes = recipe.bf16_escapes
    wanted = recipe.attention
    formats: dict[str, AttentionFormat] = {}
    kept: dict[str, str] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, SelfAttention | CrossAttention | GdpaPffn | PooledAttention):
            continue
        if isinstance(layer, SelfAttention | CrossAttention):
            layer.product_format, layer.rounding = None, NEAREST
        if wanted is None or wanted == "bf16":
            continue
        why = _why_not(name, layer, escapes)
        if why is not None:
            kept[name] = why
        elif isinstance(layer, SelfAttention | CrossAttention):
            layer.product_format = formats[name] = wanted
            found = rounding_of(recipe, name, forward=wanted, backward=(wanted,))
            # Heads that are no whole blocks are not rotated.
            whole = layer.spec.head_dim % BLOCK == 0
            layer.rounding = found if whole else replace(found, hadamard_seed=None)
    done = AttentionConversion(formats, kept, mx_attention_way(device))
    if wanted not in (None, "bf16"):
        _log.info("precision: %s", done.told())
    return done


def _why_not(
    name: str,
    layer: SelfAttention | CrossAttention | GdpaPffn | PooledAttention,
    escapes: Sequence[str],
) -> str | None:
    if any(name == prefix or name.startswith(f"{prefix}.") for prefix in escapes):
        return "on the escape list"
    if isinstance(layer, PooledAttention):
        return "pooled by seeds"
    if isinstance(layer, GdpaPffn) or layer.spec.activation != "softmax":
        return "no softmax"
    return "in blocks" if layer.spec.pattern == "block" else None
