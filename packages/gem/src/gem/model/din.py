"""Deep Interest Network: the plain model that the hybrid is compared with.

It reads the same tables, numbers and events. Source: Zhou et al. 2018 (arXiv:1706.06978), with
the house rules of this repository (no biases but the offset of the logit).
"""

import torch
from torch import Tensor, nn

from gem.data.batch import ExampleBatch
from gem.data.schema import BatchSchema
from gem.model.heads import Shortcut, TaskHeads
from gem.model.spec import DinSpec, MlpActivation
from gem.model.structure import module_key, reduce_schema
from gem.model.tables import batch_ids, batch_streams, build_tables
from gem.model.tokenize import Columns, EventTokens
from gem_jagged.batch import Jagged, Layout
from gem_jagged.offsets import sequence_ids
from gem_jagged.ops import jagged_mean
from gem_opkit.errors import ConfigError, UnsupportedError, refusal
from gem_precision.layers import Mlp, Projection


class TargetAttention(nn.Module):
    """Sum the events of a history, each weighted by how it fits the candidate.

        pooled = Σ_t MLP(event ‖ candidate ‖ event − candidate ‖ event · candidate) event

    The weights are not normalised, so that the sum grows with the number of fitting events.

    Args:
        width: width of an event and of the candidate.
        hidden: hidden widths of the MLP.
        activation: of the MLP.
        mean: divide by the number of events.
    """

    def __init__(
        self, width: int, hidden: tuple[int, ...], *, activation: MlpActivation, mean: bool
    ) -> None:
        super().__init__()
        self.mean = mean
        self.mlp = Mlp((4 * width, *hidden, 1), activation=activation)

    def forward(self, x_TD: Tensor, layout: Layout, candidate_BD: Tensor) -> Tensor:
        """Pool.

        Args:
            x_TD: events.
            layout: where each history begins.
            candidate_BD: the candidates.

        Returns:
            pooled_BD; 0 for an empty history.
        """
        rows = sequence_ids(layout.offsets_O, layout.total_tokens)
        candidate_TD = candidate_BD.index_select(0, rows)
        pair = torch.cat([x_TD, candidate_TD, x_TD - candidate_TD, x_TD * candidate_TD], dim=-1)
        mean_BD = jagged_mean(x_TD * self.mlp(pair), layout)
        return mean_BD if self.mean else mean_BD * layout.offsets_O.diff().unsqueeze(1)


class DinModel(nn.Module):
    """DIN over every stream of the schema.

    Args:
        spec: sizes.
        schema: inputs, tasks and domains.

    Raises:
        ConfigError: streams without a candidate.
        UnsupportedError: cached embeddings or a teacher, which DIN does not read.
    """

    def __init__(self, spec: DinSpec, schema: BatchSchema) -> None:
        super().__init__()
        if schema.vectors or schema.teacher:
            raise UnsupportedError(
                refusal(
                    "build_model",
                    "model.kind",
                    must='be "gem" with data.user_embeddings or data.teacher',
                    got='"din", which reads neither',
                    fix="remove them, or take the hybrid model",
                )
            )
        inputs = schema
        schema = reduce_schema(schema, spec.leave_out)
        names = tuple(source.name for source in schema.ids)
        if schema.streams and schema.item not in names:
            raise ConfigError(
                refusal(
                    "build_model",
                    "schema.item",
                    must="name one of the id features, since DIN attends from the candidate",
                    got=schema.item,
                    fix='declare the item, or use model kind "gem"',
                )
            )
        self.spec, self.schema, self.names = spec, schema, names
        embedding_dim = spec.embeddings.embedding_dim
        self.tables = build_tables(spec.embeddings, schema, schema.streams)
        self.candidate = Projection(embedding_dim, spec.width) if schema.streams else None
        self.numbers = Columns(inputs.numbers, schema.numbers)
        self.events, self.attention = nn.ModuleDict(), nn.ModuleDict()
        for stream, complete in zip(schema.streams, inputs.streams, strict=True):
            key = module_key(stream.name)
            self.events[key] = EventTokens(
                stream,
                spec.width,
                columns=complete.numbers,
                embedding_dim=embedding_dim,
                gap_buckets=spec.gap_buckets,
            )
            self.attention[key] = TargetAttention(
                spec.width,
                spec.attention_widths,
                activation=spec.activation,
                mean=spec.pooling == "mean",
            )
        width = len(names) * embedding_dim + len(schema.numbers) + len(schema.streams) * spec.width
        self.heads = TaskHeads(width, spec.heads, schema, activation=spec.activation)
        self.shortcut = (
            Shortcut(len(schema.numbers), len(schema.labels), gain=spec.shortcut_gain)
            if spec.shortcut and schema.numbers
            else None
        )

    def forward(self, batch: ExampleBatch) -> Tensor:
        """Predict.

        Args:
            batch: examples with their histories.

        Returns:
            logits_BA, fp32, tasks in the order of the schema's labels.

        Raises:
            DataError: the batch lacks a stream or an input of the schema.
        """
        streams = batch_streams(batch, self.schema.streams)
        embedded = self.tables(batch_ids(self.schema, batch, streams))
        numbers_BD = self.numbers(batch.numbers_BD)
        parts = [embedded[name] for name in self.names] + [numbers_BD]
        if self.candidate is not None:
            candidate_BD = self.candidate(embedded[self.schema.item])
            for stream in self.schema.streams:
                key, events = module_key(stream.name), streams[stream.name]
                x_TD = self.events[key](embedded, events.numbers.values, events.gap_seconds.values)
                parts.append(self.attention[key](x_TD, events.numbers.layout, candidate_BD))
        logits_BA = self.heads(torch.cat(parts, dim=1), batch.domains_B)
        if self.shortcut is not None:
            logits_BA = logits_BA + self.shortcut(numbers_BD)
        return logits_BA

    @property
    def only_multiplies_vectors(self) -> bool:
        """Whether each vector is read once, and by a product: the candidate's is read twice."""
        return False

    def table_ids(self, batch: ExampleBatch) -> dict[str, Jagged]:
        """Give the ids that ``forward`` looks up.

        Args:
            batch: as for ``forward``.

        Returns:
            feature name -> ids.
        """
        return batch_ids(self.schema, batch, batch_streams(batch, self.schema.streams))
