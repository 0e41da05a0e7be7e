"""What a precision recipe does to a model: the same batches beside bf16, layer by layer.

For every linear layer that the recipe changes, the guard looks at what the layer really gets (its
input, its weight, and the gradient of its output) and says how well the format holds it; over all
batches it compares the model's predictions. It changes neither weights nor what comes after. Left
out: training. How a recipe changes what a model learns shows only in paired runs.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gem_opkit.errors import ConfigError, refusal
from gem_precision.codes import INFINITE, MAGNITUDE, bits_of, largest_of_blocks, spread
from gem_precision.contract import PrecisionRecipe
from gem_precision.elements import BLOCK
from gem_precision.hadamard import rotated_factor
from gem_precision.kernels.quantized_linear.reference import rounded
from gem_precision.layers import Projection, apply_recipe
from gem_precision.recipes import convert_layers

Batch = TypeVar("Batch")
# Logits, labels, and how much each counts; 0 where a label is unknown.
Scores = tuple[Tensor, Tensor, Tensor]

# E4M3 holds 448 down to 2^-6 at full precision: a factor of 2^15 in a block. A channel that is this
# much larger than the middle one takes more than half of it from its neighbours.
OUTLIER_RATIO = 300.0
# A layer this much worse than the middle one is no more a matter of the format alone.
ERROR_RATIO = 2.0
# Share of numbers that vanish, or are cut, from which on a factor is told. Scales that are rounded
# down cut a third of a percent of normal numbers.
UNDERFLOW_FRAC = 0.01
OVERFLOW_FRAC = 0.01
_MOST_ROWS = 4_096  # of a batch that a layer's figures look at
_Z95 = 1.96


@dataclass(frozen=True, slots=True)
class FactorFigures:
    """How a format holds one factor of a product.

    Attributes:
        amax: largest magnitude.
        outlier_ratio: largest magnitude of a channel over that of the middle channel; 0 where the
            middle channel is all zeros, so that no outlier is told there.
        underflow_frac: share of numbers other than 0 that become 0.
        overflow_frac: share of numbers that are cut, or become NaN.
        error_frac: root-mean-square error over the root mean square of the numbers.
    """

    amax: float
    outlier_ratio: float
    underflow_frac: float
    overflow_frac: float
    error_frac: float


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """How one layer fares; the worst over the batches.

    Attributes:
        name: its qualified name.
        input: of its input, in the format of the output's product.
        weight: of its weight, in that format.
        gradient: of the gradient of its output, in the format of the input's gradient.
        error_frac: root-mean-square error of its output against fp32 on the same input.
        faults: why it should be taken out; empty where it may stay.
    """

    name: str
    input: FactorFigures
    weight: FactorFigures
    gradient: FactorFigures
    error_frac: float
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GuardReport:
    """What a recipe does to a model.

    Attributes:
        layers: the layers that it changes, those to be taken out first, then by error.
        kept: name of each other layer that it asked for -> why it stayed in bf16.
        ne: normalised entropy with the recipe.
        ne_bf16: that of the same weights and batches in bf16.
        ne_difference_frac: the first over the second, less 1.
        ne_interval_frac: half the width of its 95 % interval, from differences example by example.
        examples: labels that counted.
    """

    layers: tuple[LayerFigures, ...]
    kept: dict[str, str]
    ne: float
    ne_bf16: float
    ne_difference_frac: float
    ne_interval_frac: float
    examples: int

    def take_out(self) -> tuple[str, ...]:
        """Return the names of layers that should stay in bf16, worst first."""
        return tuple(layer.name for layer in self.layers if layer.faults)

    def told(self) -> str:
        """Return a few lines: the predictions, and each layer to take out with the reason."""
        difference = 100 * self.ne_difference_frac
        lines = [
            f"NE {self.ne:.6f}, bf16 {self.ne_bf16:.6f}: {difference:+.4f} % "
            f"(+-{100 * self.ne_interval_frac:.4f} %) over {self.examples:,} labels",
            f"{len(self.layers)} layers below bf16, {len(self.kept)} kept in bf16",
        ]
        for layer in self.layers:
            lines += [f"take out {layer.name}: {'; '.join(layer.faults)}"] if layer.faults else []
        if not self.take_out():
            lines.append("no layer to take out")
        return "\n".join(lines)


def guard_recipe(
    model: nn.Module,
    recipe: PrecisionRecipe,
    batches: Iterable[Batch],
    *,
    score: Callable[[nn.Module, Batch], Scores],
    device: torch.device,
    escapes: Sequence[str] = (),
) -> GuardReport:
    """Run batches through a model in bf16 and by a recipe, and say what differs and where.

    Args:
        model: runs in evaluation mode; afterwards its mode and its layers' formats are as before.
        recipe: to be judged, with formats of products.
        batches: at least one; each runs forward twice and backward once.
        score: calls the model on a batch and returns logits, labels in [0, 1] and weights.
        device: where the model is.
        escapes: as in ``convert_layers``.

    Returns:
        the report.

    Raises:
        ConfigError: no batch or no label that counts, or a recipe that changes no layer.
        UnsupportedError: a format that the device lacks.

    Numerics: figures of layers look at the first 4,096 rows of a batch. Log losses are in fp64.
    """
    layers = [m for m in model.modules() if isinstance(m, Projection)]
    before = [(layer.formats, layer.least_rows, layer.rounding) for layer in layers]
    was_training = model.training
    sums = {"recipe": [], "bf16": []}
    labels: list[Tensor] = []
    found: dict[str, LayerFigures] = {}
    model.eval()
    try:
        done = convert_layers(model, recipe, device=device, escapes=escapes)
        if not done.formats:
            raise ConfigError(
                refusal("guard_recipe", "recipe", must="change a layer", got=done.told(),
                        fix="set least_width = 0, or name other layers")
            )  # fmt: skip
        changed = [layer.formats for layer in layers]
        for layer in layers:
            layer.least_rows = 0  # what is judged is the format, however few rows there are
            # No gradient is compared, and drawing one would move the generator.
            layer.rounding = replace(layer.rounding, stochastic=False)
        frame = apply_recipe(recipe, device.type)
        for batch in batches:
            for kind in ("bf16", "recipe"):
                for layer, formats in zip(layers, changed, strict=True):
                    layer.formats = formats if kind == "recipe" else None
                with ExitStack() as hooks, torch.enable_grad():
                    if kind == "recipe":
                        _watch(model, found, hooks)
                    with frame():
                        logits, label, weight = score(model, batch)
                    counts = weight > 0
                    # An unknown label may be NaN: left out before the loss, as 0 times its gradient
                    # would be NaN too.
                    losses = F.binary_cross_entropy_with_logits(
                        torch.where(counts, logits.double(), 0.0),
                        torch.where(counts, label.double(), 0.0),
                        reduction="none",
                    )
                    losses = torch.where(counts, losses, 0.0)
                    sums[kind].append(losses.detach()[counts].cpu())
                    if kind == "recipe":
                        labels.append(label[counts].double().cpu())
                        loss = (losses * weight).sum() / weight.sum().clamp(min=1)
                        grads = [p for p in model.parameters() if p.requires_grad]
                        torch.autograd.grad(loss, grads, allow_unused=True)
    finally:
        model.train(was_training)
        for layer, (formats, least_rows, rounding) in zip(layers, before, strict=True):
            layer.formats, layer.least_rows, layer.rounding = formats, least_rows, rounding
    return _report(found, dict(done.kept), sums, labels)


def factor_figures(x: Tensor, number_format: str, block: str) -> FactorFigures:
    """Say how a format holds a matrix that is summed over its last dim.

    Args:
        x: a matrix, fp32 or bf16.
        number_format: one of ``GemmFormat``.
        block: what shares a scale in block FP8.

    Returns:
        the figures; of an empty matrix zeros.
    """
    if x.numel() == 0:
        return FactorFigures(0.0, 0.0, 0.0, 0.0, 0.0)
    wide, held = x.float(), rounded(x, number_format, block)
    finite = (bits_of(wide) & MAGNITUDE) < INFINITE
    is_there = finite & (wide != 0)
    size = wide.abs()
    channels = torch.where(finite, size, 0.0).amax(dim=0)
    middle = float(channels.median())
    cut = finite & ~finite
    if number_format == "mxfp8_floor":
        bits = largest_of_blocks(bits_of(wide) & MAGNITUDE, 1, BLOCK)
        top = spread(bits, wide, 1, BLOCK).view(torch.float32)
        # Rounding alone makes no number of the upper half of a block so much smaller.
        cut = finite & (size >= 0.5 * top) & (size > 1.065 * held.abs())
    error = torch.where(finite, held - wide, 0.0).nan_to_num(nan=math.inf)
    rms = float(torch.where(finite, wide, 0.0).double().square().mean().sqrt())
    return FactorFigures(
        amax=float(channels.max()),
        outlier_ratio=float(channels.max()) / middle if middle > 0 else 0.0,
        underflow_frac=float((is_there & (held == 0)).sum()) / max(int(is_there.sum()), 1),
        overflow_frac=float((cut | ~finite | held.isnan()).float().mean()),
        error_frac=float(error.double().square().mean().sqrt()) / rms if rms > 0 else 0.0,
    )


def _watch(model: nn.Module, found: dict[str, LayerFigures], hooks: ExitStack) -> None:
    """Look at what each changed layer gets, until the hooks are closed."""

    def seen(name: str, layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
        formats = layer.formats
        x_TD = inputs[0].detach().reshape(-1, layer.in_features)[:_MOST_ROWS]
        weight_FD = layer.weight.detach()
        y_TF = output.detach().reshape(-1, layer.out_features)[:_MOST_ROWS].float()
        exact_TF = x_TD.float() @ weight_FD.float().T
        norm = float(exact_TF.norm())

        def turned(x: Tensor, number_format: str) -> Tensor:
            seed: int | None = layer.rounding.hadamard_seed
            if seed is None or not number_format.startswith("mxfp8"):
                return x
            return rotated_factor(x, seed)

        error = float((y_TF - exact_TF).norm()) / norm if norm != 0 else 0.0
        made = LayerFigures(
            name,
            factor_figures(turned(x_TD, formats.forward), formats.forward, "1x128"),
            factor_figures(turned(weight_FD, formats.forward), formats.forward, "128x128"),
            FactorFigures(0.0, 0.0, 0.0, 0.0, 0.0),
            error if math.isfinite(error) else math.inf,
        )
        found[name] = made if name not in found else _worse(found[name], made)

        def came(grad: Tensor) -> None:
            grad_TF = grad.detach().reshape(-1, layer.out_features)[:_MOST_ROWS]
            given = turned(grad_TF, formats.input_gradient)
            figures = factor_figures(given, formats.input_gradient, "1x128")
            old = found[name]
            found[name] = LayerFigures(
                name, old.input, old.weight, _worst(old.gradient, figures), old.error_frac
            )

        if output.requires_grad:
            output.register_hook(came)

    for name, module in model.named_modules():
        if isinstance(module, Projection) and module.formats is not None:
            handle = module.register_forward_hook(partial(seen, name))
            hooks.callback(handle.remove)


def _worst(one: FactorFigures, other: FactorFigures) -> FactorFigures:
    return FactorFigures(
        *(
            max(getattr(one, field), getattr(other, field))
            for field in FactorFigures.__dataclass_fields__
        )
    )


def _worse(one: LayerFigures, other: LayerFigures) -> LayerFigures:
    return LayerFigures(
        one.name,
        _worst(one.input, other.input),
        _worst(one.weight, other.weight),
        _worst(one.gradient, other.gradient),
        max(one.error_frac, other.error_frac),
    )


def _faults(layer: LayerFigures, middle_error: float) -> tuple[str, ...]:
    said = []
    if not math.isfinite(layer.error_frac):
        said.append("its output is not finite")
    elif layer.error_frac > ERROR_RATIO * middle_error > 0:
        said.append(f"error {layer.error_frac:.2%}, the middle layer's is {middle_error:.2%}")
    for what in ("input", "weight", "gradient"):
        figures: FactorFigures = getattr(layer, what)
        if figures.outlier_ratio > OUTLIER_RATIO:
            said.append(
                f"one channel of its {what} is {figures.outlier_ratio:,.0f} times the middle one"
            )
        if figures.overflow_frac > OVERFLOW_FRAC:
            said.append(f"{figures.overflow_frac:.2%} of its {what} is cut or NaN")
        if figures.underflow_frac > UNDERFLOW_FRAC:
            said.append(f"{figures.underflow_frac:.2%} of its {what} becomes 0")
    return tuple(said)


def _report(
    found: dict[str, LayerFigures],
    kept: dict[str, str],
    sums: dict[str, list[Tensor]],
    labels: list[Tensor],
) -> GuardReport:
    label = torch.cat(labels) if labels else torch.zeros(0)
    if label.numel() == 0:
        raise ConfigError(
            refusal("guard_recipe", "batches", must="hold a label that counts", got="none",
                    fix="give batches with labels")
        )  # fmt: skip
    errors = torch.tensor([layer.error_frac for layer in found.values()])
    middle = float(errors.median()) if len(errors) else 0.0
    layers = [
        LayerFigures(f.name, f.input, f.weight, f.gradient, f.error_frac, _faults(f, middle))
        for f in found.values()
    ]
    layers.sort(key=lambda layer: (not layer.faults, -layer.error_frac))
    rate = float(label.mean())
    entropy = -sum(p * math.log(p) for p in (rate, 1 - rate) if p > 0)
    low, bf16 = torch.cat(sums["recipe"]), torch.cat(sums["bf16"])
    base = float(bf16.mean())
    spread = float((low - bf16).std()) if label.numel() > 1 else 0.0
    per_entropy = partial(_over, entropy)
    return GuardReport(
        layers=tuple(layers),
        kept=kept,
        ne=per_entropy(float(low.mean())),
        ne_bf16=per_entropy(base),
        ne_difference_frac=_over(base, float((low - bf16).mean())),
        ne_interval_frac=_over(base, _Z95 * spread / math.sqrt(label.numel())),
        examples=label.numel(),
    )


def _over(below: float, above: float) -> float:
    """Divide; NaN where it is undefined, as NE is on labels of one class."""
    return above / below if below > 0 else math.nan
