"""The one evaluation path: `gem train`, `gem eval` and the benchmarks all come through here."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from gem.data.batch import ExampleBatch
from gem.data.schema import BatchSchema
from gem.model.heads import probabilities
from gem.train.local_tensors import put_parameters_back
from gem.train.metrics import MetricBlock
from gem_parallel.collectives import all_gather_rows
from gem_parallel.launch import World


@dataclass(frozen=True, slots=True)
class Predictions:
    """Scored examples of one batch over all ranks, in the order of the log.

    Attributes:
        row_B: position in the log.
        user_B: user.
        domains_B: domain index.
        p_BA: probabilities, float32.
        labels_BA: labels, float32; NaN where unknown.
        heads_BD: what the heads read of each example, float32; None where nobody asked for it.
    """

    row_B: np.ndarray
    user_B: np.ndarray
    domains_B: np.ndarray
    p_BA: np.ndarray
    labels_BA: np.ndarray
    heads_BD: np.ndarray | None = None


def evaluate(
    model: nn.Module,
    batches: Iterator[ExampleBatch],
    schema: BatchSchema,
    world: World,
    *,
    precision: Callable[[], AbstractContextManager[object]],
    on_batch: Callable[[int], None] = lambda _: None,
    sink: Callable[[Predictions], None] | None = None,
    embeddings: bool = False,
) -> MetricBlock:
    """Score the batches of a split and measure.

    Args:
        model: the model itself, not its data-parallel wrapper; put into evaluation mode and back.
        batches: of this rank.
        schema: of the batches.
        world: the ranks.
        precision: makes the context of a forward pass.
        on_batch: told the number of batches done, after each one.
        sink: gets the predictions of each batch in turn, those of all ranks, on every rank; so no
            more than a batch of them is held.
        embeddings: give it what the heads read as well.

    Returns:
        The metrics' block over all ranks, the same on each.
    """
    block = MetricBlock(schema.labels, schema.domains)
    read_by_heads: list[Tensor] = []
    training = model.training
    model.eval()
    hook = None
    if embeddings:
        hook = model.get_submodule("heads").register_forward_pre_hook(
            lambda _, inputs: read_by_heads.append(inputs[0])
        )
    try:
        with torch.no_grad():
            for done, batch in enumerate(batches, start=1):
                read_by_heads.clear()
                with precision():
                    logits_BA = model(batch.to(world.device))
                heads_BD = read_by_heads[0].float().cpu().numpy() if read_by_heads else None
                scored = _to_host(batch, probabilities(logits_BA).cpu().numpy(), heads_BD)
                mask_BA = batch.label_mask_BA.numpy()
                block.update(
                    scored.p_BA,
                    np.where(mask_BA, scored.labels_BA, np.float32(0)),
                    mask_BA,
                    scored.domains_B,
                    scored.user_B,
                )
                if sink is not None:
                    sink(_of_all_ranks(scored, world))
                on_batch(done)
    finally:
        if hook is not None:
            hook.remove()
        model.train(training)
        put_parameters_back(model)
    return merge_ranks(block, world)


def merge_ranks(block: MetricBlock, world: World) -> MetricBlock:
    """Merge every rank's block. Every rank has to call this.

    Args:
        block: of this rank.
        world: the ranks.

    Returns:
        The block of all ranks' examples, the same on every rank; ``block`` itself on one rank.
    """
    if world.size == 1:
        return block
    data = torch.from_numpy(block.to_bytes().copy()).to(world.device)
    lengths = all_gather_rows(torch.tensor([data.numel()], device=world.device), world).tolist()
    parts = torch.split(all_gather_rows(data, world).cpu(), lengths)
    merged = MetricBlock(block.tasks, block.domains)
    for part in parts:
        merged.merge(MetricBlock.from_bytes(part.numpy(), block.tasks, block.domains))
    return merged


class PredictionsFile:
    """One row for each example and task, in a Parquet file that is whole or not there.

    Use it in a ``with`` block; where that ends with an exception, nothing is left.

    Args:
        path: the Parquet file; replaced once the new one is whole.
        schema: names tasks and domains.
    """

    def __init__(self, path: Path, schema: BatchSchema) -> None:
        self._path, self._schema = path, schema
        self._partial = path.with_name(f".{path.name}.partial")
        self._writer = ParquetRows(self._partial)

    def write(self, split: str, found: Predictions) -> None:
        """Append a batch.

        Args:
            split: its split.
            found: its predictions.
        """
        rows = len(found.row_B)
        for a, task in enumerate(self._schema.labels):
            label = found.labels_BA[:, a]
            columns = {
                "split": constant_column(split, rows),
                "row": pa.array(found.row_B, pa.int64()),
                "user": pa.array(found.user_B, pa.int64()),
                "domain": domain_column(found.domains_B, self._schema),
                "task": constant_column(task, rows),
                "p": pa.array(found.p_BA[:, a], pa.float32()),
                "label": pa.array(label, pa.float32(), mask=np.isnan(label)),
            }
            self._writer.write(pa.table(columns))

    def __enter__(self) -> "PredictionsFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._writer.close()
            if kind is None and self._partial.exists():
                self._partial.rename(self._path)
        finally:
            self._partial.unlink(missing_ok=True)


class ParquetRows:
    """Appends small tables to a Parquet file, in row groups of a useful size.

    Args:
        path: made at the first row.
        group_bytes: size from which on the waiting rows are written as one group.
    """

    def __init__(self, path: Path, *, group_bytes: int = 1 << 25) -> None:
        self.rows = 0
        self._path, self._group_bytes = path, group_bytes
        self._writer: pq.ParquetWriter | None = None
        self._waiting: list[pa.Table] = []
        self._bytes = 0

    def write(self, table: pa.Table) -> None:
        """Append rows.

        Args:
            table: of the same columns each time.
        """
        self.rows += table.num_rows
        self._waiting.append(table)
        self._bytes += table.nbytes
        if self._bytes >= self._group_bytes:
            self._flush()

    def close(self) -> None:
        """Write what waits and close the file."""
        try:
            self._flush()
        finally:
            if self._writer is not None:
                self._writer.close()

    def _flush(self) -> None:
        if not self._waiting:
            return
        group = pa.concat_tables(self._waiting).unify_dictionaries()
        self._waiting.clear()
        self._bytes = 0
        writer = self._writer or pq.ParquetWriter(self._path, group.schema)
        self._writer = writer
        writer.write_table(group)


def constant_column(value: str, rows: int) -> pa.Array:
    """A column of one text.

    Args:
        value: the text.
        rows: how many.
    """
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([value]))


def domain_column(domains_B: np.ndarray, schema: BatchSchema) -> pa.Array:
    """The names of domains.

    Args:
        domains_B: their indices.
        schema: has the names.
    """
    names = pa.array(schema.domains, pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(domains_B, pa.int32()), names)


def _to_host(batch: ExampleBatch, p_BA: np.ndarray, heads_BD: np.ndarray | None) -> Predictions:
    labels_BA = torch.where(batch.label_mask_BA, batch.labels_BA, float("nan")).numpy()
    row_B, user_B, domains_B = (x.numpy() for x in (batch.row_B, batch.user_B, batch.domains_B))
    return Predictions(row_B, user_B, domains_B, p_BA, labels_BA, heads_BD)


def _of_all_ranks(found: Predictions, world: World) -> Predictions:
    """Every rank's slice of the batch. The slices follow one another, so the order is the log's."""
    if world.size == 1:
        return found
    columns = []
    for name in Predictions.__slots__:
        own = getattr(found, name)
        if own is not None:
            own = all_gather_rows(torch.from_numpy(own).to(world.device), world).cpu().numpy()
        columns.append(own)
    return Predictions(*columns)
