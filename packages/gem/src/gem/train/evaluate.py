"""The one evaluation path: `gem train`, `gem eval` and the benchmarks all come through here."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from gem.data.batch import ExampleBatch
from gem.data.schema import BatchSchema
from gem.train.metrics import MetricBlock
from gem.train.step import probabilities
from gem_parallel.collectives import all_gather_rows
from gem_parallel.launch import World


@dataclass(frozen=True, slots=True)
class Predictions:
    """Scored examples of a split, in the order of the log.

    Attributes:
        row_B: position in the log.
        user_B: user.
        domains_B: domain index.
        p_BA: probabilities, float32.
        labels_BA: labels, float32; NaN where unknown.
    """

    row_B: np.ndarray
    user_B: np.ndarray
    domains_B: np.ndarray
    p_BA: np.ndarray
    labels_BA: np.ndarray


def evaluate(
    model: nn.Module,
    batches: Iterator[ExampleBatch],
    schema: BatchSchema,
    world: World,
    *,
    precision: Callable[[], AbstractContextManager[object]],
    on_batch: Callable[[int], None] = lambda _: None,
    keep_predictions: bool = False,
) -> tuple[MetricBlock, Predictions | None]:
    """Score the batches of a split and measure.

    Args:
        model: the model itself, not its data-parallel wrapper; put into evaluation mode and back.
        batches: of this rank.
        schema: of the batches.
        world: the ranks.
        precision: makes the context of a forward pass.
        on_batch: told the number of batches done, after each one.
        keep_predictions: also return every row's probabilities.

    Returns:
        The metrics' block over all ranks, the same on each, and the predictions of all ranks or
        None.
    """
    block = MetricBlock(schema.labels, schema.domains)
    kept: list[Predictions] = []
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for done, batch in enumerate(batches, start=1):
                with precision():
                    logits_BA = model(batch.to(world.device))
                scored = _to_host(batch, probabilities(logits_BA).cpu().numpy())
                mask_BA = batch.label_mask_BA.numpy()
                block.update(
                    scored.p_BA,
                    np.where(mask_BA, scored.labels_BA, np.float32(0)),
                    mask_BA,
                    scored.domains_B,
                    scored.user_B,
                )
                if keep_predictions:
                    kept.append(scored)
                on_batch(done)
    finally:
        model.train(training)
    merged = merge_ranks(block, world)
    return merged, _gather(kept, schema, world) if keep_predictions else None


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


def write_predictions(path: Path, splits: dict[str, Predictions], schema: BatchSchema) -> None:
    """Write one row for each example and task.

    Args:
        path: the Parquet file.
        splits: split -> its predictions.
        schema: names tasks and domains.
    """
    tables = []
    for split, found in splits.items():
        rows = len(found.row_B)
        domains = pa.array(found.domains_B, pa.int64())
        for a, task in enumerate(schema.labels):
            label = found.labels_BA[:, a]
            columns = {
                "split": pa.array([split] * rows, pa.string()).dictionary_encode(),
                "row": pa.array(found.row_B, pa.int64()),
                "user": pa.array(found.user_B, pa.int64()),
                "domain": pa.DictionaryArray.from_arrays(
                    domains.cast(pa.int32()), pa.array(schema.domains, pa.string())
                ),
                "task": pa.array([task] * rows, pa.string()).dictionary_encode(),
                "p": pa.array(found.p_BA[:, a], pa.float32()),
                "label": pa.array(label, pa.float32(), mask=np.isnan(label)),
            }
            tables.append(pa.table(columns))
    partial = path.with_name(f".{path.name}.partial")
    pq.write_table(pa.concat_tables(tables).unify_dictionaries(), partial)
    partial.rename(path)


def _to_host(batch: ExampleBatch, p_BA: np.ndarray) -> Predictions:
    labels = torch.where(batch.label_mask_BA, batch.labels_BA, float("nan"))
    return Predictions(
        batch.row_B.numpy(), batch.user_B.numpy(), batch.domains_B.numpy(), p_BA, labels.numpy()
    )


def _gather(kept: list[Predictions], schema: BatchSchema, world: World) -> Predictions:
    tasks = len(schema.labels)
    empty = Predictions(
        *(np.empty(0, np.int64) for _ in range(3)),
        *(np.empty((0, tasks), np.float32) for _ in range(2)),
    )
    columns = []
    for name in Predictions.__slots__:
        own = np.concatenate([getattr(part, name) for part in (empty, *kept)])
        gathered = all_gather_rows(torch.from_numpy(own).to(world.device), world)
        columns.append(gathered.cpu().numpy())
    order = np.argsort(columns[0], kind="stable")
    return Predictions(*(column[order] for column in columns))
