"""Number formats and the recipe that assigns them to the layers of a model.

Torch-free. A recipe is a policy: it says what is wanted. What is built decides
`gem_precision.layers.apply_recipe`, which refuses a format that no kernel computes yet.
"""

from typing import Literal

from pydantic import Field, model_validator

from gem_opkit.contract import Contract

NumberFormat = Literal["fp32", "bf16_autocast", "mxfp8", "fp8_block", "mxfp4", "nvfp4"]
LayerKind = Literal["projection", "mlp", "attention", "norm", "head"]

# Words of MXFP8 quantisation: how a scale is rounded, what an element is, what shares a scale, and
# in which dim blocks of 1x32 lie.
MxScaling = Literal["mxfp8_rceil", "mxfp8_floor"]
MxElement = Literal["e4m3", "e5m2"]
MxBlock = Literal["1x32", "32x32"]
MxDirection = Literal["rows", "columns"]


class PrecisionRecipe(Contract):
    """Which number format each kind of layer computes in.

    Attributes:
        default: format of every layer that nothing below names. ``fp32`` computes in float32,
            ``bf16_autocast`` runs matrix products in bfloat16 under ``torch.autocast`` while
            parameters stay float32.
        layer_formats: other formats for single kinds of layer.
        bf16_escapes: modules that a format below bf16 must leave alone, by a prefix of their
            qualified name; they compute in bf16. Without such a format the list changes nothing.
    """

    default: NumberFormat = Field(
        default="fp32", description="format of every layer that nothing else names"
    )
    layer_formats: dict[LayerKind, NumberFormat] = Field(
        default_factory=dict[LayerKind, NumberFormat],
        description="format of one kind of layer, in place of the default",
    )
    bf16_escapes: tuple[str, ...] = Field(
        default=(),
        description="prefixes of qualified module names that stay at bf16 or wider",
    )

    @model_validator(mode="after")
    def _escapes_are_names(self) -> "PrecisionRecipe":
        for prefix in self.bf16_escapes:
            if not prefix or prefix.startswith(".") or prefix.endswith("."):
                raise ValueError(
                    f"PrecisionRecipe: bf16_escapes must hold prefixes of module names; "
                    f"got {prefix!r}; write it like 'heads.trunk'"
                )
        return self

    def formats(self) -> tuple[NumberFormat, ...]:
        """Return every format that the recipe asks for, the default first, each once."""
        return tuple(dict.fromkeys((self.default, *self.layer_formats.values())))
