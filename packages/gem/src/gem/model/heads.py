"""From the last tokens to one logit for each task, and the loss over what is known.

The trunk is shared by tasks and domains; each task may have an MLP above it; each domain may
have a last layer of its own. Left out: metrics (`gem.train`).
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem.data.batch import ExampleBatch
from gem.data.schema import BatchSchema
from gem.model.spec import HeadsSpec, MlpActivation
from gem.model.structure import check_tasks
from gem_opkit.errors import ConfigError, refusal
from gem_precision.layers import Mlp, Projection

_ACTIVATIONS: dict[MlpActivation, type[nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "identity": nn.Identity,
}


class TaskHeads(nn.Module):
    """Tasks x domains over a shared trunk.

    The offset of each logit is the only additive parameter of the model; it starts at the base
    rate that the spec names, so that the first steps need not be spent on finding it.

    Args:
        width: width of the vector that comes in.
        spec: sizes.
        schema: tasks and domains.
        activation: of the MLPs.

    Raises:
        ConfigError: the spec names a task that the schema does not have.
    """

    def __init__(
        self, width: int, spec: HeadsSpec, schema: BatchSchema, *, activation: MlpActivation
    ) -> None:
        super().__init__()
        check_tasks("heads.base_rates", spec.base_rates, schema.labels)
        check_tasks("heads.task_weights", spec.task_weights, schema.labels)
        tasks = len(schema.labels)
        self.domains = len(schema.domains) if spec.domain_outputs else 1
        self.trunk = hidden_layers((width, *spec.trunk_widths), activation, spec.dropout)
        width = (width, *spec.trunk_widths)[-1]
        self.towers = nn.ModuleList(
            hidden_layers((width, *spec.task_widths), activation, spec.dropout)
            for _ in range(tasks if spec.task_widths else 0)
        )
        width = (width, *spec.task_widths)[-1]
        self.weight = nn.Parameter(
            torch.randn(tasks, width, self.domains) * spec.init_gain * width**-0.5
        )
        self.offset = nn.Parameter(
            base_logits(schema.labels, spec.base_rates).unsqueeze(1).repeat(1, self.domains)
        )

    def forward(self, x_BD: Tensor, domains_B: Tensor) -> Tensor:
        """Predict.

        Args:
            x_BD: everything that the model knows of an example.
            domains_B: index of its domain, int64.

        Returns:
            logits_BA, fp32.
        """
        trunk_BF = self.trunk(x_BD)
        towers = [tower(trunk_BF) for tower in self.towers] or [trunk_BF] * len(self.weight)
        # (tasks, B, F) @ (tasks, F, domains): every domain is computed, one is kept.
        logits = torch.bmm(torch.stack(towers), self.weight).float() + self.offset.unsqueeze(1)
        domain_B = domains_B if self.domains > 1 else torch.zeros_like(domains_B)
        index = domain_B.view(1, -1, 1).expand(len(self.weight), -1, 1)
        return logits.gather(2, index).squeeze(2).t()


def hidden_layers(widths: Sequence[int], activation: MlpActivation, dropout: float) -> nn.Module:
    """Make an MLP whose last layer is a hidden one: activation and dropout follow it.

    Args:
        widths: sizes of the input and of each layer; the input alone gives the identity.
        activation: after each layer.
        dropout: after each activation.

    Returns:
        a module that maps (..., widths[0]) to (..., widths[-1]).
    """
    if len(widths) == 1:
        return nn.Identity()
    inner = Mlp(widths, activation=activation, dropout=dropout)
    return nn.Sequential(inner, _ACTIVATIONS[activation](), nn.Dropout(dropout))


class Shortcut(nn.Module):
    """Linear map from the continuous inputs to the logits, 0 at the start.

    Statistics that predict by themselves then count from the first step, and the rest of the
    model learns what they leave.

    Args:
        numbers: continuous inputs.
        tasks: logits.
        gain: factor behind the map. An optimizer that normalises gradients then moves the logits
            that many times as fast.
    """

    def __init__(self, numbers: int, tasks: int, *, gain: float = 1.0) -> None:
        super().__init__()
        self.gain = gain
        self.linear = Projection(numbers, tasks, init_gain=0.0)

    def forward(self, numbers_BD: Tensor) -> Tensor:
        """Map.

        Args:
            numbers_BD: continuous inputs, fp32.

        Returns:
            logits (B, A), fp32, to be added to others.
        """
        return self.linear(numbers_BD).float() * self.gain


def base_logits(tasks: Sequence[str], rates: Mapping[str, float]) -> Tensor:
    """Turn base rates into logits.

    Args:
        tasks: task names.
        rates: task -> rate in (0, 1); 0.5 if absent.

    Returns:
        logit_A, fp32.
    """
    rate = [rates.get(task, 0.5) for task in tasks]
    return torch.tensor([math.log(p / (1.0 - p)) for p in rate])


def probabilities(logits_BA: Tensor) -> Tensor:
    """What all metrics and predictions are made of.

    Args:
        logits_BA: float32.

    Returns:
        p_BA, float32: the sigmoid in float64, rounded once.
    """
    return torch.sigmoid(logits_BA.double()).float()


def known_weight(batch: ExampleBatch) -> Tensor:
    """Add up the weights of the examples whose label is known.

    Args:
        batch: examples.

    Returns:
        weight_A, fp32. Sum it over ranks for the `known_A` of `multi_task_loss`.
    """
    return (batch.label_mask_BA * batch.weights_B.unsqueeze(1)).sum(0)


def multi_task_loss(
    logits_BA: Tensor,
    batch: ExampleBatch,
    task_weights: Sequence[float],
    *,
    known_A: Tensor | None = None,
) -> Tensor:
    """Return the training loss: cross-entropy, over known labels only.

        Σ_a task_weight[a] · Σ_b m[b,a] w[b] bce(logit[b,a], label[b,a]) / Σ_b m[b,a] w[b]

    Each task is a mean of its own, so that a task with few known labels keeps its weight.

    Args:
        logits_BA: as the model returns them, fp32.
        batch: labels in [0, 1], their masks, and example weights.
        task_weights: one for each task, in the order of the labels.
        known_A: denominators, in place of this batch's own; under data parallelism their sum
            over ranks, which makes the sum of the ranks' losses the loss of the whole batch.

    Returns:
        a scalar, fp32; 0, with zero gradients, where no label is known.

    Raises:
        ConfigError: a wrong number of task weights.
    """
    tasks = logits_BA.shape[1]
    if len(task_weights) != tasks:
        raise ConfigError(
            refusal(
                "multi_task_loss",
                "task_weights",
                must=f"have one weight for each of {tasks} tasks",
                got=len(task_weights),
                fix="give them in the order of the labels",
            )
        )
    weight_BA = batch.label_mask_BA * batch.weights_B.unsqueeze(1)
    loss_BA = F.binary_cross_entropy_with_logits(
        logits_BA.float(), batch.labels_BA, reduction="none"
    )
    known_A = weight_BA.sum(0) if known_A is None else known_A
    # A task without known labels has a zero numerator too, so 1 does for its denominator. A tiny
    # one would not: 1 / tiny overflows under a task weight or a factor of the whole loss, and the
    # backward pass would multiply 0 by infinity.
    mean_A = (loss_BA * weight_BA).sum(0) / torch.where(known_A > 0, known_A, 1.0)
    # Filled on the device: a copy from the host would wait for it, in the midst of the step.
    return mean_A @ torch.stack([mean_A.new_full((), weight) for weight in task_weights])


def auxiliary_loss(sum_K: Tensor, known_K: Tensor) -> Tensor:
    """Return the loss that a model has of its own, beside that of the tasks.

    Args:
        sum_K: losses times their weights, summed over examples, fp32.
        known_K: weights of these examples, over all parts and ranks of the batch.

    Returns:
        a scalar, fp32: the sum of the means; one without examples counts 0.
    """
    # As above: 1 in place of 0, and nothing tiny.
    return (sum_K / torch.where(known_K > 0, known_K, 1.0)).sum()
