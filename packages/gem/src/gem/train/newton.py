"""The linear map from numbers to logits, learned by Newton's method in one pass.

Statistics that predict well by themselves are correlated, and a method of first order needs many
steps to share the weight out among them. A logistic loss of a linear map has a curvature that one
pass can add up exactly, one small matrix a task:

    P_a  =  I / prior  +  Σ over all rows so far  w p (1 - p) x xᵀ
    W_a  ←  W_a  -  P_a⁻¹  Σ over the rows of a step  w (p - y) x

p is that of the whole model, so the map learns what the rest of it leaves, and the rest what the
map leaves. Where it stands alone, this is the Laplace approximation of Bayesian logistic
regression, step by step; ``prior`` is the variance that a weight has before the first row, and
plays the part of 1 / L2.

Left out: several ranks; maps of other inputs than numbers, whose matrices would be too large.

Source: Spiegelhalter and Lauritzen 1990 (Networks 20) for the sequential update.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from gem.config import RunConfig
from gem.data.batch import ExampleBatch
from gem.model.gem import GemModel
from gem.model.spec import GemSpec
from gem_opkit.errors import ConfigError, UnsupportedError, refusal


class NewtonMap(torch.optim.Optimizer):
    """Moves the weight of the shortcut of a model; nothing of it has a learning rate.

    Args:
        weight_AD: of the map, one row a task, fp32.
        prior: variance of a weight before the first row, above 0; of the map as a whole, with its
            gain.
        gain: factor behind the map.
        task_weights: factor of each task's loss. A task of weight 0 does not move.
    """

    def __init__(
        self, weight_AD: nn.Parameter, *, prior: float, gain: float, task_weights: Sequence[float]
    ) -> None:
        super().__init__([weight_AD], {"lr": 1.0})
        self.weight_AD, self._gain, self._task_weights = weight_AD, gain, tuple(task_weights)
        tasks, width = weight_AD.shape
        eye_DD = torch.eye(width, dtype=weight_AD.dtype, device=weight_AD.device) / prior
        # A checkpoint brings it back in the dtype of the weight.
        self.state[weight_AD] = {"curvature": eye_DD.repeat(tasks, 1, 1)}
        self._seen: list[Tensor] = []
        self._taken: list[Tensor] = []

    @torch.no_grad()
    def observe(self, numbers_BD: Tensor, logits_BA: Tensor, batch: ExampleBatch) -> None:
        """Add the curvature of rows to what the next step will know.

        Args:
            numbers_BD: inputs of the map, fp32.
            logits_BA: of the whole model.
            batch: the same rows, with masks and weights.
        """
        p_BA = torch.sigmoid(logits_BA.float())
        h_BA = p_BA * (1.0 - p_BA) * batch.label_mask_BA * batch.weights_B.unsqueeze(1)
        x_BD = numbers_BD.float()
        self._seen.append(torch.einsum("ba,bd,be->ade", h_BA, x_BD, x_BD))

    @torch.no_grad()
    def take(self, known_A: Tensor) -> None:
        """Take the gradient away from the weight, before others measure or clip it.

        Args:
            known_A: what each task's loss was divided by.
        """
        grad_AD = self.weight_AD.grad
        self.weight_AD.grad = None
        self._taken = [] if grad_AD is None else [grad_AD.float() * known_A.float().unsqueeze(1)]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - no closure
        """Take what was observed into account, and move the weight.

        Args:
            closure: none is taken.
        """
        curvature_ADD = self.state[self.weight_AD]["curvature"]
        for seen_ADD in self._seen:
            curvature_ADD += seen_ADD
        if self._taken:
            scale_A = [0.0 if w == 0.0 else 1.0 / (w * self._gain**2) for w in self._task_weights]
            scale_A1 = torch.tensor(scale_A, dtype=torch.float64).unsqueeze(1)
            grad_AD = self._taken[0].double() * scale_A1.to(self.weight_AD.device)
            # No check of the host, which would wait for a device; P has the prior on its diagonal.
            factor_ADD, _ = torch.linalg.cholesky_ex(curvature_ADD.double())
            change_AD = torch.cholesky_solve(grad_AD.unsqueeze(2), factor_ADD).squeeze(2)
            self.weight_AD -= change_AD.to(self.weight_AD.dtype)
        self.forget()

    def held(self) -> list[Tensor]:
        """What was observed since the last step, none of which a step can take that is no number.

        Returns:
            gradients and curvatures.
        """
        return [*self._taken, *self._seen]

    def forget(self) -> None:
        """Drop what was observed since the last step: that of a step that is left out."""
        self._seen, self._taken = [], []


def newton_map(
    config: RunConfig, model: nn.Module, task_weights: Sequence[float], *, ranks: int
) -> NewtonMap | None:
    """Make what learns the shortcut of a model by Newton's method, where the recipe wants it.

    Args:
        config: the run.
        model: on its device.
        task_weights: factor of each task's loss.
        ranks: of the run.

    Returns:
        it; None for a model whose shortcut learns as all the rest does.

    Raises:
        ConfigError: the model has no shortcut.
        UnsupportedError: several ranks.
    """
    spec = config.model
    if not isinstance(spec, GemSpec) or spec.numbers.shortcut_rule != "newton":
        return None
    shortcut = cast(GemModel, model).shortcut
    if shortcut is None:
        users = spec.user_model is not None
        raise ConfigError(
            refusal(
                "gem train",
                "model.numbers.shortcut_rule",
                must='be "gradient" for a model without a linear map from numbers to logits',
                got=f'"newton" and {"a model of users" if users else "no numbers to read"}',
                fix="leave it out",
            )
        )
    if ranks > 1:
        raise UnsupportedError(
            refusal(
                "gem train",
                "model.numbers.shortcut_rule",
                must='be "gradient" on several ranks',
                got=f'"newton" on {ranks}',
                fix="train on one rank, or leave it out",
            )
        )
    return NewtonMap(
        cast(nn.Parameter, shortcut.linear.weight),
        prior=spec.numbers.shortcut_prior,
        gain=shortcut.gain,
        task_weights=task_weights,
    )
