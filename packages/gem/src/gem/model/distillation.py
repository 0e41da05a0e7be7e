"""Learning from a teacher's logged logits: an auxiliary head, and an adapter that corrects them.

    corrected ← z + f(z ‖ stop(h))        by fresh labels, cross-entropy
    head(h)   ← σ(stop(corrected))        cross-entropy with the soft target

`z` are the teacher's logits, `h` what the serving head reads. Without an adapter the head learns
σ(z). Nothing of this module is in the logits that are served.

Source: auxiliary head and student adapter of ExFM (arXiv:2502.17494).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem.data.batch import ExampleBatch
from gem.data.schema import BatchSchema
from gem.model.spec import GemSpec
from gem.model.transfer_spec import DistillationSpec
from gem_opkit.errors import ConfigError, DataError, refusal
from gem_precision.layers import Mlp, Projection

# Probabilities of a teacher may be 0 or 1 to the last bit.
_MOST_LOGIT = 15.0


class Distillation(nn.Module):
    """The auxiliary head and the adapter.

    Args:
        width: width of what the serving head reads.
        spec: the model; it has a section `distillation`.
        schema: the tasks; batches of it carry a teacher's logits.

    Raises:
        ConfigError: nobody names a teacher.
    """

    def __init__(self, width: int, spec: GemSpec, schema: BatchSchema) -> None:
        super().__init__()
        if spec.distillation is None or not schema.teacher:
            raise ConfigError(
                refusal(
                    "build_model",
                    "distillation",
                    must="come with a teacher's predictions",
                    got="no data.teacher",
                    fix="set data.teacher.folder to what gem predict wrote, or remove the section",
                )
            )
        self.spec: DistillationSpec = spec.distillation
        tasks = len(schema.labels)
        widths = (width, *self.spec.hidden_widths, tasks)
        self.head = Mlp(widths, activation=spec.activation)
        hidden = self.spec.adapter_hidden
        self.adapter = self.correct = None
        if self.spec.adapter:
            self.adapter = Mlp((width + tasks, hidden, hidden), activation=spec.activation)
            # The teacher as it is, to begin with.
            self.correct = Projection(hidden, tasks, init_gain=0.0)

    def known(self, batch: ExampleBatch) -> Tensor:
        """Weights of the examples that each loss is a mean over.

        Args:
            batch: examples.

        Returns:
            weight_K, fp32: of the head for each task, then of the adapter likewise.
        """
        said_BA, labelled_BA = self._masks(batch)
        return torch.cat([said_BA.sum(0), labelled_BA.sum(0)])

    def forward(self, x_BD: Tensor, batch: ExampleBatch) -> Tensor:
        """Losses times their weights, summed over the examples.

        Args:
            x_BD: what the serving head reads.
            batch: examples with their teacher's logits.

        Returns:
            sum_K, fp32, in the order of `known`.
        """
        said_BA, labelled_BA = self._masks(batch)
        teacher_BA = _teacher(batch).nan_to_num(0.0).clamp(-_MOST_LOGIT, _MOST_LOGIT)
        adapter_A = teacher_BA.new_zeros(teacher_BA.shape[1])
        if self.adapter is not None and self.correct is not None:
            read = torch.cat([teacher_BA.to(x_BD.dtype), x_BD.detach()], dim=1)
            moved_BA = self.correct(torch.relu(self.adapter(read))).float()
            teacher_BA = teacher_BA + moved_BA
            loss_BA = F.binary_cross_entropy_with_logits(
                teacher_BA, batch.labels_BA, reduction="none"
            )
            adapter_A = (loss_BA * labelled_BA).sum(0) * self.spec.adapter_weight
        target_BA = torch.sigmoid(teacher_BA.detach())
        loss_BA = F.binary_cross_entropy_with_logits(
            self.head(x_BD).float(), target_BA, reduction="none"
        )
        return torch.cat([(loss_BA * said_BA).sum(0) * self.spec.weight, adapter_A])

    def _masks(self, batch: ExampleBatch) -> tuple[Tensor, Tensor]:
        """Weight of each example where the teacher said something, and where there is a label."""
        said_BA = (~_teacher(batch).isnan()) * batch.weights_B.unsqueeze(1)
        return said_BA, said_BA * batch.label_mask_BA


def _teacher(batch: ExampleBatch) -> Tensor:
    if batch.teacher_BA is None:
        raise DataError(
            refusal(
                "forward",
                "batch.teacher_BA",
                must="be there in training",
                got="None",
                fix="read it: data.teacher",
            )
        )
    return batch.teacher_BA
