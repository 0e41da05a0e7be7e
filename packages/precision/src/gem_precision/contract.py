"""Number formats and the recipe that assigns them to the layers of a model.

Torch-free. A recipe is a policy: it says what is wanted. ``gem_precision.layers.apply_recipe``
makes the frame that a step runs in, and refuses a format that nothing computes;
``gem_precision.recipes`` gives linear layers the formats of their products.
"""

from collections.abc import Mapping
from typing import Any, Literal, cast

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
# What shares a scale in block FP8: a piece of a row (activations, gradients), a square (weights).
Fp8Block = Literal["1x128", "128x128"]


# Formats of a matrix product: what both of its factors are rounded to.
GemmFormat = Literal["bf16", "fp8_block", "mxfp8_rceil", "mxfp8_floor"]
# Of the products of softmax attention; "bf16" is what attention computes in by itself.
AttentionFormat = Literal["bf16", "mxfp8_rceil", "mxfp8_floor"]
# Of a weight's gradient, which sums over tokens: blocks of 128 of them have no product.
WeightGradientFormat = Literal["bf16", "mxfp8_rceil", "mxfp8_floor"]


class LinearFormats(Contract):
    """The formats of the three products of a linear map.

    Attributes:
        forward: of the output: input times weight.
        input_gradient: of the gradient of the input: that of the output times the weight.
        weight_gradient: of the gradient of the weight: that of the output times the input.
    """

    forward: GemmFormat = Field(default="bf16", description="format of the output's product")
    input_gradient: GemmFormat = Field(
        default="bf16", description="format of the product that gives the input's gradient"
    )
    weight_gradient: WeightGradientFormat = Field(
        default="bf16", description="format of the product that gives the weight's gradient"
    )


class LayerRule(LinearFormats):
    """The formats of some linear layers.

    Attributes:
        modules: which layers, by their qualified names; ``*`` stands for any text. A name stands
            for all layers below it, too.
    """

    modules: str = Field(
        min_length=1,
        description="layers by qualified name; * stands for any text, a name for all below it",
    )


class PrecisionRecipe(Contract):
    """Which number format each kind of layer computes in.

    Attributes:
        default: format of every layer that nothing below names. ``fp32`` computes in float32,
            ``bf16_autocast`` runs matrix products in bfloat16 under ``torch.autocast`` while
            parameters stay float32.
        layer_formats: other formats for single kinds of layer.
        recipe: format of the products of linear layers that no rule names; ``fp8_block`` leaves
            the weight's gradient in bf16. Everything else computes as ``bf16_autocast``.
        rules: formats of single layers; the last rule that fits a layer decides.
        attention: format of the products of softmax attention, forward and backward, in the layers
            that can have one (``gem_attention.recipes``). None: bf16.
        bf16_escapes: modules that a format below bf16 must leave alone, by a prefix of their
            qualified name; they compute in bf16, whatever a rule says. None: those that the model
            names itself, its heads and its last layer. Without such a format it changes nothing.
        least_width: layers of which the input or the output is narrower stay in bf16. None: block
            FP8 runs where it was measured to pay (both sides at least 1,024 wide and whole blocks
            of 128, a weight of at least 2,048², and per call rows x weight of at least
            65,536 x 2,048²), MXFP8 everywhere.
        stochastic_rounding: gradients are rounded to MXFP8 up or down by chance, in products of
            linear layers and of attention, so that they are right on average. By a seed that
            torch's default generator draws for each call.
        random_hadamard: both factors of a product in MXFP8 are rotated by a random Hadamard matrix
            of 32 before they are rounded, which spreads an outlier over its block. In plain torch:
            right numbers, and slow. Attention takes it where heads are a multiple of 32 wide.
        gather_in_8_bits: where ranks share a layer's weight, the weights of layers in ``fp8_block``
            travel in 8 bits, quantised by the rank that trains them. Such a layer reads the numbers
            of block FP8 in every call, also in one that stays in bf16.
    """

    default: NumberFormat = Field(
        default="fp32", description="format of every layer that nothing else names"
    )
    layer_formats: dict[LayerKind, NumberFormat] = Field(
        default_factory=dict[LayerKind, NumberFormat],
        description="format of one kind of layer, in place of the default",
    )
    recipe: GemmFormat | None = Field(
        default=None, description="format of the products of linear layers that no rule names"
    )
    rules: tuple[LayerRule, ...] = Field(
        default=(), description="formats of single layers; the last that fits decides"
    )
    attention: AttentionFormat | None = Field(
        default=None, description="format of the products of softmax attention; none: bf16"
    )
    bf16_escapes: tuple[str, ...] | None = Field(
        default=None,
        description="prefixes of qualified module names that stay at bf16 or wider; none: heads "
        "and last layer",
    )
    least_width: int | None = Field(
        default=None,
        ge=0,
        description="narrower layers stay in bf16; none: the measured break-even of the format",
    )
    stochastic_rounding: bool = Field(
        default=False, description="gradients are rounded to MXFP8 up or down by chance"
    )
    random_hadamard: bool = Field(
        default=False,
        description="factors in MXFP8 are rotated by a random Hadamard matrix before they are "
        "rounded",
    )
    gather_in_8_bits: bool = Field(
        default=False,
        description="ranks that share a weight of a layer in fp8_block gather it in 8 bits",
    )

    @model_validator(mode="before")
    @classmethod
    def _rest_is_bf16(cls, given: Any) -> Any:
        """What has products in 8 bits has the others in bf16, unless somebody says otherwise."""
        if isinstance(given, Mapping) and "default" not in given:
            named = cast(Mapping[str, Any], given)
            eight_bits = named.get("attention") not in (None, "bf16")
            if named.get("recipe") is not None or named.get("rules") or eight_bits:
                return {**named, "default": "bf16_autocast"}
        return cast(Any, given)

    @model_validator(mode="after")
    def _products_have_a_frame(self) -> "PrecisionRecipe":
        if (self.recipe is not None or self.rules) and self.default != "bf16_autocast":
            raise ValueError(
                'PrecisionRecipe: default must be "bf16_autocast" where recipe or rules name '
                f"formats of products; got {self.default!r}; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _something_is_gathered(self) -> "PrecisionRecipe":
        formats = {self.recipe, *(rule.forward for rule in self.rules)}
        if self.gather_in_8_bits and "fp8_block" not in formats:
            raise ValueError(
                "PrecisionRecipe: gather_in_8_bits must stand beside a recipe or rule in "
                f"'fp8_block', whose weights it sends; got {self.recipe!r}; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _something_is_in_mxfp8(self) -> "PrecisionRecipe":
        backward = [f for rule in self.rules for f in (rule.input_gradient, rule.weight_gradient)]
        forward = [rule.forward for rule in self.rules]
        for key, own in (
            ("stochastic_rounding", [self.recipe, self.attention, *backward]),
            ("random_hadamard", [self.recipe, self.attention, *backward, *forward]),
        ):
            if getattr(self, key) and not any(str(f).startswith("mxfp8") for f in own):
                raise ValueError(
                    f"PrecisionRecipe: {key} must stand beside a recipe, a rule or attention in "
                    f"MXFP8, whose rounding it changes; got recipe {self.recipe!r}; leave it out, "
                    "or take 'mxfp8_rceil'"
                )
        return self

    @model_validator(mode="after")
    def _escapes_are_names(self) -> "PrecisionRecipe":
        for prefix in self.bf16_escapes or ():
            if not prefix or prefix.startswith(".") or prefix.endswith("."):
                raise ValueError(
                    f"PrecisionRecipe: bf16_escapes must hold prefixes of module names; "
                    f"got {prefix!r}; write it like 'heads.trunk'"
                )
        return self

    def formats(self) -> tuple[NumberFormat, ...]:
        """Return every format that the recipe asks for, the default first, each once.

        Formats of single products (``recipe``, ``rules``) are not among them.
        """
        return tuple(dict.fromkeys((self.default, *self.layer_formats.values())))
