"""Heads of an upstream model of users: one vector of a user, and what is learned by it.

    u       ← RmsNorm(linear(trunk(x ‖ h)))                 the user embedding
    logit   ← u · c(candidate) / √U + g · u[task] + b(candidate)    engagement, each task
    next    ← softmax over the items of the batch of u · v(item) / √U
    gap     ← softmax over knots of the log time since the latest event

The candidate enters here and nowhere else, so that `u` is a function of the user alone. The first
numbers of `u` are, up to a factor, what the user adds to the logit of each task, whichever
checkpoint made it: a ranker that reads embeddings of many checkpoints finds the same thing there.
Items of the batch are drawn as often as they are shown; each score is corrected by how often its
item was drawn, and an item is no negative of itself.

Source: LLaTTE (arXiv:2601.20083) for the stage; Yi et al. 2019 (RecSys, sampling-bias-corrected
retrieval) for the softmax.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gem.data.batch import ExampleBatch, StreamBatch
from gem.data.schema import BatchSchema
from gem.model.heads import base_logits, hidden_layers
from gem.model.spec import GemSpec
from gem.model.structure import check_tasks
from gem.model.tokenize import gap_basis
from gem.model.transfer_spec import UserModelSpec
from gem_jagged.batch import Layout
from gem_jagged.offsets import sequence_ids
from gem_opkit.errors import ConfigError, refusal
from gem_precision.layers import Projection, RmsNorm

_FIRST_GAIN = 0.3


class UserHeads(nn.Module):
    """From what the layers made of a user to the embedding, and to logits of a candidate.

    Args:
        width: width of the vector that comes in.
        spec: the model; it has a `user_model`.
        schema: tasks and domains.
        candidate_ids: id inputs of the candidate and of the moment.
        item_ids: those of the candidate alone.

    Raises:
        ConfigError: an embedding with fewer numbers than tasks, or a task that there is not.
    """

    def __init__(
        self, width: int, spec: GemSpec, schema: BatchSchema, *, candidate_ids: int, item_ids: int
    ) -> None:
        super().__init__()
        own = _user_model(spec)
        if own.width < len(schema.labels):
            raise ConfigError(
                refusal(
                    "build_model",
                    "user_model.width",
                    must=f"be at least {len(schema.labels)}, a number for each task",
                    got=own.width,
                    fix="raise it",
                )
            )
        heads, tasks, embedding = spec.heads, len(schema.labels), spec.embeddings.embedding_dim
        check_tasks("heads.base_rates", heads.base_rates, schema.labels)
        check_tasks("heads.task_weights", heads.task_weights, schema.labels)
        self.width, self.tasks = own.width, tasks
        self.domains = len(schema.domains) if heads.domain_outputs else 1
        self.trunk = hidden_layers((width, *heads.trunk_widths), spec.activation, heads.dropout)
        self.embed = Projection((width, *heads.trunk_widths)[-1], own.width)
        self.norm = RmsNorm(own.width)
        # The candidate says nothing at the start: logits begin at their offset, and `u` learns
        # once it does.
        self.candidate = hidden_layers(
            (candidate_ids * embedding, own.candidate_hidden), spec.activation, heads.dropout
        )
        self.mixed = Projection(own.candidate_hidden, tasks * (own.width + 1), init_gain=0.0)
        self.gain = nn.Parameter(torch.full((tasks,), _FIRST_GAIN))
        self.item = Projection(item_ids * embedding, own.width)
        self.gap = Projection(own.width, own.time_gap_knots, init_gain=0.0)
        self.offset = nn.Parameter(
            base_logits(schema.labels, heads.base_rates).unsqueeze(1).repeat(1, self.domains)
        )

    def user(self, x_BD: Tensor) -> Tensor:
        """Make the user embedding.

        Args:
            x_BD: what the layers made of users.

        Returns:
            vectors_BU of unit mean square.
        """
        return self.norm(self.embed(self.trunk(x_BD)))

    def forward(
        self, x_BD: Tensor, candidate_BE: Tensor, domains_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Predict.

        Args:
            x_BD: what the layers made of users.
            candidate_BE: embedded ids of candidate and moment, side by side.
            domains_B: index of the domain, int64.

        Returns:
            logits_BA, fp32, and the user embeddings.
        """
        user_BU = self.user(x_BD)
        mixed = self.mixed(self.candidate(candidate_BE)).view(-1, self.tasks, self.width + 1)
        scores_BA = torch.einsum("bu,bau->ba", user_BU, mixed[:, :, :-1]) * self.width**-0.5
        logits_BA = scores_BA + mixed[:, :, -1] + user_BU[:, : self.tasks] * self.gain
        domain_B = domains_B if self.domains > 1 else torch.zeros_like(domains_B)
        return logits_BA.float() + self.offset.t().index_select(0, domain_B), user_BU

    def next_scores(self, user_BU: Tensor, item_RE: Tensor) -> Tensor:
        """Score items as a user's next one.

        Args:
            user_BU: user embeddings.
            item_RE: embedded ids of items, side by side.

        Returns:
            scores_BR, fp32.
        """
        item_RU = self.item(item_RE)
        # Outside of autocast, which would round both factors and the scores to bf16.
        with torch.autocast(user_BU.device.type, enabled=False):
            return (user_BU.float() @ item_RU.float().t()) * self.width**-0.5


class UserLosses:
    """What a user embedding is trained by, beside engagement.

    Args:
        spec: weights and sizes.
        schema: tasks, and which input is the item.
    """

    def __init__(self, spec: UserModelSpec, schema: BatchSchema) -> None:
        if spec.next_event_task is not None:
            check_tasks("user_model.next_event_task", {spec.next_event_task: 1.0}, schema.labels)
        self.spec, self.item = spec, schema.item
        task = spec.next_event_task
        self.task = None if task is None else schema.labels.index(task)

    def known(self, batch: ExampleBatch, latest_B: Tensor) -> Tensor:
        """Weights of the examples that each loss is a mean over.

        Args:
            batch: examples.
            latest_B: seconds since each user's latest event; infinite without any.

        Returns:
            weight_K, fp32: next item, time gap.
        """
        has_B = torch.isfinite(latest_B)
        weight_BK = torch.stack([self._next(batch), has_B.float() * batch.weights_B], dim=1)
        return weight_BK.sum(0)

    def sums(
        self,
        batch: ExampleBatch,
        heads: UserHeads,
        user_BU: Tensor,
        item_BE: Tensor,
        latest_B: Tensor,
    ) -> Tensor:
        """Losses times their weights, summed over the examples.

        Args:
            batch: examples.
            heads: of the model.
            user_BU: user embeddings.
            item_BE: embedded ids of each example's item, side by side.
            latest_B: as for `known`.

        Returns:
            sum_K, fp32, in the order of `known`.
        """
        items_B = batch.ids[self.item or ""].values
        same_BB = items_B.unsqueeze(1) == items_B.unsqueeze(0)
        # Of the examples that are one item together, each stands for its share of them.
        scores_BB = heads.next_scores(user_BU, item_BE) - same_BB.sum(0).float().log()
        itself_BB = torch.eye(len(items_B), dtype=torch.bool, device=items_B.device)
        scores_BB = scores_BB.masked_fill(same_BB & ~itself_BB, float("-inf"))
        next_B = -scores_BB.log_softmax(1).diagonal()
        has_B = torch.isfinite(latest_B)
        wanted_BK = gap_basis(torch.where(has_B, latest_B, 0.0), self.spec.time_gap_knots)
        gap_B = -(wanted_BK * heads.gap(user_BU).float().log_softmax(1)).sum(1)
        return torch.stack(
            [
                (next_B * self._next(batch)).sum() * self.spec.next_event_weight,
                (gap_B * has_B * batch.weights_B).sum() * self.spec.time_gap_weight,
            ]
        )

    def _next(self, batch: ExampleBatch) -> Tensor:
        """Weight of each example as a user's next item."""
        if self.task is None:
            return batch.weights_B
        positive_B = batch.label_mask_BA[:, self.task] & (batch.labels_BA[:, self.task] >= 0.5)
        return positive_B * batch.weights_B


def since_latest(streams: Mapping[str, StreamBatch], examples: int, like: Tensor) -> Tensor:
    """Tell how long ago the latest event of each user was.

    Args:
        streams: events, oldest first.
        examples: number of examples.
        like: a tensor whose device is meant.

    Returns:
        seconds_B, fp32; infinite for users without events.
    """
    latest_B = torch.full((examples,), float("inf"), device=like.device)
    for events in streams.values():
        gaps_T = events.gap_seconds.values
        if not len(gaps_T):
            continue
        offsets_O = events.numbers.layout.offsets_O
        last_B = gaps_T.index_select(0, (offsets_O[1:] - 1).clamp_min(0))
        there_B = offsets_O[1:] > offsets_O[:-1]
        latest_B = torch.where(there_B, torch.minimum(latest_B, last_B), latest_B)
    return latest_B


def ages_of_events(gap_seconds_T: Tensor, layout: Layout, latest_B: Tensor) -> Tensor:
    """Count the age of events from the user's latest one in place of the example.

    Args:
        gap_seconds_T: seconds from each event to the example.
        layout: where each history begins.
        latest_B: from `since_latest`.

    Returns:
        seconds_T, at least 0.
    """
    if not len(gap_seconds_T):
        return gap_seconds_T
    sequence_T = sequence_ids(layout.offsets_O, layout.total_tokens)
    return (gap_seconds_T - latest_B.index_select(0, sequence_T)).clamp_min(0.0)


def _user_model(spec: GemSpec) -> UserModelSpec:
    if spec.user_model is None:
        raise TypeError("UserHeads: the model has no user_model")
    return spec.user_model
