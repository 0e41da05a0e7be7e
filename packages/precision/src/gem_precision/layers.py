"""Dense layers of the models, and the application of a precision recipe to them.

The published models use no biases and norms without gains, so both are the default here. Which
products of a linear layer are in 8 bits is set by ``gem_precision.recipes``.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gem_opkit.errors import ConfigError, ShapeError, UnsupportedError, refusal
from gem_precision.contract import LinearFormats, PrecisionRecipe
from gem_precision.norms import has_kernel, norm_beside_input, rms_normalize
from gem_precision.ops import layer_norm, quantized_linear, rms_norm
from gem_precision.rounding import NEAREST, Rounding

MlpActivation = Literal["relu", "gelu", "silu", "identity"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "identity": lambda x: x,
}
_BUILT_FORMATS = ("fp32", "bf16_autocast")


def apply_recipe(
    recipe: PrecisionRecipe, device_type: str
) -> Callable[[], AbstractContextManager[object]]:
    """Turn a recipe into a factory of the contexts that a forward pass runs in.

    Make the factory once and enter a fresh context a step::

        precision = apply_recipe(recipe, "cuda")
        with precision():
            logits = model(batch)

    Args:
        recipe: what is wanted.
        device_type: "cpu", "cuda" or another name that ``torch.autocast`` takes.

    Returns:
        a function without arguments that returns a new context manager: one that does nothing
        for ``fp32``, ``torch.autocast`` to bfloat16 for ``bf16_autocast``.

    Raises:
        UnsupportedError: the recipe asks for a format that is not built, or for different
            formats for different kinds of layer.
    """
    for wanted in recipe.formats():
        if wanted not in _BUILT_FORMATS:
            raise UnsupportedError(
                refusal(
                    "apply_recipe",
                    "recipe",
                    must=f"use formats that are built ({', '.join(_BUILT_FORMATS)})",
                    got=wanted,
                    fix='take "bf16_autocast", or name the products in recipe',
                )
            )
    if len(recipe.formats()) > 1:
        raise UnsupportedError(
            refusal(
                "apply_recipe",
                "layer_formats",
                must="name the same format as default (mixing formats by layer is not built)",
                got=dict(recipe.layer_formats),
                fix=f'leave it empty to compute everything in "{recipe.default}"',
            )
        )
    if recipe.default == "fp32":
        return nullcontext
    return lambda: torch.autocast(device_type, dtype=torch.bfloat16)


class RmsNorm(nn.Module):
    """Divide each row by its root mean square; no gain unless asked for.

        y = x / sqrt(mean(x², last dim) + ε) [· gain],  or with ``swish``  x σ(y)

    Args:
        width: size of the last dim, above 0.
        affine: learn a gain for each column, starting at 1.
        eps: added to the mean square, above 0.
        swish: gate each row by its own norm (SwishRMSNorm).

    Raises:
        ConfigError: a width or eps out of range; forward raises ShapeError for another width.

    Source: Zhang and Sennrich 2019 (arXiv:1910.07467).
    """

    def __init__(
        self, width: int, *, affine: bool = False, eps: float = 1e-6, swish: bool = False
    ) -> None:
        super().__init__()
        _check_width("RmsNorm", width)
        _check_eps("RmsNorm", eps)
        self.width = width
        self.eps = eps
        self.swish = swish
        self.gain_D = nn.Parameter(torch.ones(width)) if affine else None

    def forward(
        self,
        x: Tensor,
        *,
        before: Tensor | None = None,
        after: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Normalise the last dim; on a GPU with what is added around it in the same kernel.

        Args:
            x: floats of any shape that ends in the width.
            before: added to x first; the shape of x.
            after: added to the result; the shape of x.
            dropout: share of the normalised values set to 0 before ``after`` is added, in [0, 1),
                in training and out of it; drawn from torch's default generator.

        Returns:
            y of the same shape, in the dtype that holds all of them.

        Raises:
            ShapeError: the input ends in another width, or what is added has another shape: it is
                not broadcast.
        """
        _check_last_dim("RmsNorm", x, self.width)
        _check_around("RmsNorm", x, before=before, after=after)
        _check_dropout("RmsNorm", dropout)
        if has_kernel(x):
            given = {"gain_D": self.gain_D, "dropout": dropout, "seed": _seed_of(dropout)}
            given |= {"eps": self.eps, "swish": self.swish}
            return rms_norm(x, before=before, after=after, **given)
        a = x if before is None else x + before
        y = rms_normalize(a, self.eps)
        y = y if self.gain_D is None else (y * self.gain_D).to(a.dtype)
        y = a * torch.sigmoid(y) if self.swish else y
        y = F.dropout(y, dropout) if dropout else y
        return y if after is None else y + after

    def beside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise x, which is used elsewhere too, such as on a residual stream.

        Args:
            x: as in ``forward``.

        Returns:
            the norm, and x for its other uses: on a GPU the gradients of both add up in one pass.

        Raises:
            ShapeError: x ends in another width.
        """
        _check_last_dim("RmsNorm", x, self.width)
        if self.gain_D is None and not self.swish and has_kernel(x):
            return norm_beside_input(x, centred=False, eps=self.eps)
        return self(x), x

    def extra_repr(self) -> str:
        """Width and gain, for ``print(module)``."""
        return f"{self.width}, affine={self.gain_D is not None}"


class LayerNorm(nn.Module):
    """Subtract each row's mean and divide by its standard deviation; no gain unless asked for.

        y = (x − mean(x)) / sqrt(var(x) + ε) [· gain]

    There is never an offset: the models carry no biases.

    Args:
        width: size of the last dim, above 0.
        affine: learn a gain for each column, starting at 1.
        eps: added to the variance, above 0.

    Raises:
        ConfigError: a width or eps out of range; forward raises ShapeError for another width.

    Source: Ba et al. 2016 (arXiv:1607.06450).
    """

    def __init__(self, width: int, *, affine: bool = False, eps: float = 1e-6) -> None:
        super().__init__()
        _check_width("LayerNorm", width)
        _check_eps("LayerNorm", eps)
        self.width = width
        self.eps = eps
        self.gain_D = nn.Parameter(torch.ones(width)) if affine else None

    def forward(
        self,
        x: Tensor,
        *,
        before: Tensor | None = None,
        after: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Normalise the last dim; on a GPU with what is added around it in the same kernel.

        Args:
            x: floats of any shape that ends in the width.
            before: added to x first; the shape of x.
            after: added to the result; the shape of x.
            dropout: share of the normalised values set to 0 before ``after`` is added, in [0, 1),
                in training and out of it; drawn from torch's default generator.

        Returns:
            y of the same shape, in the dtype that holds all of them.

        Raises:
            ShapeError: the input ends in another width, or what is added has another shape: it is
                not broadcast.
        """
        _check_last_dim("LayerNorm", x, self.width)
        _check_around("LayerNorm", x, before=before, after=after)
        _check_dropout("LayerNorm", dropout)
        if has_kernel(x):
            given = {"gain_D": self.gain_D, "dropout": dropout, "seed": _seed_of(dropout)}
            return layer_norm(x, before=before, after=after, eps=self.eps, **given)
        a = x if before is None else x + before
        # autocast would return float32 here; the caller's dtype is what the next matmul reads.
        y = F.layer_norm(a, (self.width,), self.gain_D, None, self.eps).to(a.dtype)
        y = F.dropout(y, dropout) if dropout else y
        return y if after is None else y + after

    def beside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise x, which is used elsewhere too, such as on a residual stream.

        Args:
            x: as in ``forward``.

        Returns:
            the norm, and x for its other uses: on a GPU the gradients of both add up in one pass.

        Raises:
            ShapeError: x ends in another width.
        """
        _check_last_dim("LayerNorm", x, self.width)
        if self.gain_D is None and has_kernel(x):
            return norm_beside_input(x, centred=True, eps=self.eps)
        return self(x), x

    def extra_repr(self) -> str:
        """Width and gain, for ``print(module)``."""
        return f"{self.width}, affine={self.gain_D is not None}"


class Projection(nn.Linear):
    """A linear map without bias.

        y = x Wᵀ,   W (out_width, in_width) drawn from N(0, init_gain² / in_width)

    so that inputs of unit variance give outputs of variance init_gain².

    Args:
        in_width: size of the last dim of the input, above 0.
        out_width: size of the last dim of the output, above 0.
        init_gain: standard deviation of the outputs at the start, at least 0.

    Attributes:
        formats: of its three products, where one is below bf16 (``gem_precision.recipes`` sets
            them); None computes in the dtype of the input, or autocast's.
        least_rows: calls with fewer rows compute as without formats.
        rounding: of factors in MXFP8, where one is among the formats.

    Raises:
        ConfigError: a width out of range; forward raises ShapeError for another width.
    """

    formats: LinearFormats | None = None
    least_rows: int = 0
    rounding: Rounding = NEAREST

    @property
    def draws_random(self) -> bool:
        """Whether a forward pass that learns draws from torch's generator."""
        return self.rounding.stochastic

    def __init__(self, in_width: int, out_width: int, *, init_gain: float = 1.0) -> None:
        _check_width("Projection", in_width)
        _check_width("Projection", out_width)
        self.init_gain = init_gain
        super().__init__(in_width, out_width, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weight anew from torch's default generator of its device."""
        nn.init.normal_(self.weight, std=self.init_gain * self.in_features**-0.5)

    def forward(self, input: Tensor) -> Tensor:
        """Map the last dim.

        Args:
            input: floats of any shape that ends in in_width.

        Returns:
            y, the same shape with out_width last.

        Raises:
            ShapeError: the input ends in another width.
        """
        _check_last_dim("Projection", input, self.in_features)
        if self.formats is None or input.numel() < self.least_rows * self.in_features:
            return super().forward(input)
        # What autocast would read and return; it does not reach into an operator of our own.
        kind = input.device.type
        wide = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        x_TD = input.to(wide).reshape(-1, self.in_features)
        y_TF = quantized_linear(
            x_TD,
            self.weight,
            formats=self.formats,
            seed=self.rounding.seed(),
            hadamard_seed=self.rounding.hadamard_seed,
        )
        return y_TF.view(*input.shape[:-1], self.out_features)


class Mlp(nn.Module):
    """Projections with an activation, and dropout, between them.

    Nothing follows the last projection: its output may be a logit.

    Args:
        widths: sizes of input, hidden layers and output; at least two, each above 0.
        activation: between the projections.
        dropout: share of hidden values set to 0 in training, in [0, 1).

    Raises:
        ConfigError: fewer than two widths, an unknown activation or a dropout out of range.
    """

    def __init__(
        self, widths: Sequence[int], *, activation: MlpActivation = "relu", dropout: float = 0.0
    ) -> None:
        super().__init__()
        if len(widths) < 2:
            raise ConfigError(
                refusal(
                    "Mlp",
                    "widths",
                    must="hold at least an input and an output width",
                    got=list(widths),
                    fix="write it like (64, 128, 1)",
                )
            )
        if activation not in _ACTIVATIONS:
            raise ConfigError(
                refusal(
                    "Mlp",
                    "activation",
                    must=f"be one of {', '.join(get_args(MlpActivation))}",
                    got=repr(activation),
                    fix='use "relu" if in doubt',
                )
            )
        _check_dropout("Mlp", dropout)
        self.activation = activation
        # sqrt(2) keeps the variance through a ReLU, which drops half of it (He et al. 2015); the
        # smooth ones are close to it. The last projection has nothing after it.
        gain = 1.0 if activation == "identity" else 2.0**0.5
        last = len(widths) - 2
        self.projections = nn.ModuleList(
            # An activation scales what follows it, so the first projection starts at 1.
            Projection(widths[i], widths[i + 1], init_gain=gain if i > 0 else 1.0)
            for i in range(last + 1)
        )
        self.dropout = nn.Dropout(dropout) if dropout > 0.0 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map the last dim.

        Args:
            x: floats of any shape that ends in widths[0].

        Returns:
            y, the same shape with widths[-1] last.

        Raises:
            ShapeError: the input ends in another width.
        """
        activate = _ACTIVATIONS[self.activation]
        for projection in list(self.projections)[:-1]:
            x = self.dropout(activate(projection(x)))
        return self.projections[-1](x)


def _check_width(op: str, width: int) -> None:
    if width <= 0:
        raise ConfigError(
            refusal(op, "width", must="be above 0", got=width, fix="give the size of the last dim")
        )


def _check_eps(op: str, eps: float) -> None:
    if not eps > 0:
        raise ConfigError(
            refusal(op, "eps", must="be above 0", got=eps, fix="it keeps a row of zeros finite")
        )


def _check_dropout(op: str, dropout: float) -> None:
    if not 0.0 <= dropout < 1.0:
        raise ConfigError(
            refusal(op, "dropout", must="be in [0, 1)", got=dropout, fix="0 turns it off")
        )


def _seed_of(dropout: float) -> int:
    """Draw a seed on the host, so that nothing waits for a GPU."""
    return int(torch.randint(2**62, ())) if dropout else 0


def _check_around(op: str, x: Tensor, **added: Tensor | None) -> None:
    """Refuse on every device what the kernel does not take."""
    for name, tensor in added.items():
        if tensor is not None and tensor.shape != x.shape:
            raise ShapeError(
                refusal(
                    op,
                    name,
                    must=f"have the shape {tuple(x.shape)}",
                    got=tuple(tensor.shape),
                    fix="it is not broadcast",
                )
            )


def _check_last_dim(op: str, x: Tensor, width: int) -> None:
    if x.ndim == 0 or x.shape[-1] != width:
        raise ShapeError(
            refusal(
                op,
                "x",
                must=f"end in a dim of {width}, the width of the layer",
                got=f"shape {tuple(x.shape)}",
                fix="build the layer for this width",
            )
        )
