"""A precision recipe applied to a model: which linear layer computes which product in which format.

A layer keeps its weight, its name and its place in checkpoints; only the products change. Left out:
attention, and products that are no ``Projection``.
"""

import difflib
import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from gem_opkit.errors import ConfigError, refusal
from gem_precision.contract import LayerRule, LinearFormats, PrecisionRecipe
from gem_precision.elements import WIDE_BLOCK
from gem_precision.kernels.quantized_linear.op import check_formats, formats_named
from gem_precision.layers import Projection
from gem_precision.rounding import NEAREST, Rounding

_log = logging.getLogger("gem_precision")

# Block FP8 is no faster, quantisation included, where a side is narrower or the weight smaller, or
# where a product is so small that the host's launches take longer: docs/precision.md has the map.
LEAST_BLOCK_WIDTH = 1_024
LEAST_BLOCK_WEIGHT = 2_048 * 2_048
LEAST_BLOCK_WORK = 65_536 * LEAST_BLOCK_WEIGHT  # rows x input x output
_BF16 = LinearFormats()


@dataclass(frozen=True, slots=True)
class Conversion:
    """What became of the linear layers of a model.

    Attributes:
        formats: name of each layer with a product below bf16 -> the formats of its products.
        kept: name of each other layer that the recipe asked for -> why it stayed in bf16.
        layers: number of linear layers.
        least_rows: name of a layer -> rows below which a call of it stays in bf16.
    """

    formats: Mapping[str, LinearFormats]
    kept: Mapping[str, str]
    layers: int
    least_rows: Mapping[str, int]

    def told(self) -> str:
        """One line: how many layers compute in which format, and why others do not."""
        kinds: dict[str, int] = {}
        for formats in self.formats.values():
            kinds[formats.forward] = kinds.get(formats.forward, 0) + 1
        reasons: dict[str, int] = {}
        for reason in self.kept.values():
            reasons[reason] = reasons.get(reason, 0) + 1
        parts = [
            f"{count} of {self.layers} linear layers in {kind}" for kind, count in kinds.items()
        ]
        parts = parts or [f"none of {self.layers} linear layers below bf16"]
        rows = sorted(set(self.least_rows.values()))
        if rows:
            span = f"{rows[0]:,}" + (f" to {rows[-1]:,}" if len(rows) > 1 else "")
            parts.append(f"calls with fewer than {span} rows stay in bf16, where 8 bits do not pay")
        return "; ".join([*parts, *(f"{n} in bf16: {why}" for why, n in reasons.items())])


def convert_layers(
    model: nn.Module,
    recipe: PrecisionRecipe,
    *,
    device: torch.device,
    escapes: Sequence[str] = (),
    most_rows: Mapping[str, int] | None = None,
) -> Conversion:
    """Give every linear layer of a model the formats that a recipe names for it.

    Args:
        model: its ``Projection`` layers are the linear ones; changed in place. A recipe without
            formats of products sets them all to bf16.
        recipe: what is wanted.
        device: where the model will run.
        escapes: prefixes of names that stay in bf16 where the recipe names none itself.
        most_rows: prefix of names -> rows of a call at most, where somebody knows. Layers whose
            calls can never have enough rows for block FP8 to pay stay in bf16 altogether.

    Returns:
        what became of each layer; one line of it is logged.

    Raises:
        ConfigError: a rule or an escape of the recipe fits no layer; the nearest names are told.
        UnsupportedError: a format that the device lacks.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Projection)}
    for rule in recipe.rules:
        _demand_match("rules", rule.modules, (n for n in layers if _fits(n, rule.modules)), layers)
    for prefix in recipe.bf16_escapes or ():
        _demand_match("bf16_escapes", prefix, (n for n in layers if _under(n, prefix)), layers)
    if recipe.bf16_escapes is not None:
        escapes = recipe.bf16_escapes
    formats: dict[str, LinearFormats] = {}
    kept: dict[str, str] = {}
    least_rows: dict[str, int] = {}
    for name, layer in layers.items():
        wanted = _wanted(name, recipe)
        layer.formats, layer.least_rows, layer.rounding = None, 0, NEAREST
        if wanted == _BF16:
            continue
        why = _why_not(name, layer, wanted, recipe.least_width, escapes)
        by_rows = recipe.least_width is None and _has_blocks(wanted)
        rows = -(-LEAST_BLOCK_WORK // (layer.in_features * layer.out_features)) if by_rows else 0
        if why is None and any(_under(name, p) and m < rows for p, m in (most_rows or {}).items()):
            why = "too few rows for 8 bits to pay"
        if why is not None:
            kept[name] = why
            continue
        check_formats(wanted, device)
        layer.formats = formats[name] = wanted
        layer.rounding = rounding_of(
            recipe,
            name,
            forward=wanted.forward,
            backward=(wanted.input_gradient, wanted.weight_gradient),
        )
        if by_rows:
            layer.least_rows = least_rows[name] = rows
    done = Conversion(formats, kept, len(layers), least_rows)
    if recipe.recipe not in (None, "bf16") or recipe.rules:
        _log.info("precision: %s", done.told())
    return done


def rounding_of(
    recipe: PrecisionRecipe, name: str, *, forward: str, backward: Sequence[str]
) -> Rounding:
    """How a layer rounds what is in MXFP8.

    Args:
        recipe: what is wanted.
        name: of the layer; the signs of its rotation follow from it.
        forward: format of the layer's products in the forward pass.
        backward: of those in the backward pass.

    Returns:
        the rounding; to the nearest, without rotation, where no product is in MXFP8.
    """
    by_chance = recipe.stochastic_rounding and any(map(_is_mx, backward))
    turns = recipe.random_hadamard and any(map(_is_mx, (forward, *backward)))
    return Rounding(by_chance, zlib.crc32(name.encode()) if turns else None)


def _is_mx(number_format: str) -> bool:
    return number_format.startswith("mxfp8")


def _wanted(name: str, recipe: PrecisionRecipe) -> LinearFormats:
    for rule in reversed(recipe.rules):
        if _fits(name, rule.modules):
            return _products(rule)
    return _BF16 if recipe.recipe is None else formats_named(recipe.recipe)


def _products(rule: LayerRule) -> LinearFormats:
    return LinearFormats(
        forward=rule.forward,
        input_gradient=rule.input_gradient,
        weight_gradient=rule.weight_gradient,
    )


def _why_not(
    name: str,
    layer: Projection,
    wanted: LinearFormats,
    least_width: int | None,
    escapes: Sequence[str],
) -> str | None:
    if any(_under(name, prefix) for prefix in escapes):
        return "on the escape list"
    narrow = min(layer.in_features, layer.out_features)
    if least_width is not None:
        return f"narrower than {least_width}" if narrow < least_width else None
    if not _has_blocks(wanted):
        return None
    if layer.in_features % WIDE_BLOCK or layer.out_features % WIDE_BLOCK:
        return f"not whole blocks of {WIDE_BLOCK}"
    is_large = layer.in_features * layer.out_features >= LEAST_BLOCK_WEIGHT
    return None if is_large and narrow >= LEAST_BLOCK_WIDTH else "too small for 8 bits to pay"


def _has_blocks(formats: LinearFormats) -> bool:
    return "fp8_block" in (formats.forward, formats.input_gradient)


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _demand_match(field: str, given: str, found: Iterable[str], layers: Iterable[str]) -> None:
    if any(True for _ in found):
        return
    names = list(layers)
    parents = {".".join(n.split(".")[:i]) for n in names for i in range(1, n.count(".") + 1)}
    near = difflib.get_close_matches(given, [*names, *sorted(parents)], n=3, cutoff=0.0)
    raise ConfigError(
        refusal(
            "convert_layers",
            field,
            must="fit a linear layer of the model",
            got=repr(given),
            fix=f"nearest names: {', '.join(near)}" if near else "the model has no linear layer",
        )
    )
