"""The one evaluation path: several ranks give the digits, the rows and the order of one."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gem.data.batch import ExampleBatch
from gem.data.prepare import default_folder, prepare
from gem.data.reader import open_reader
from gem.train.evaluate import Predictions, evaluate
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks


class RowModel(nn.Module):
    """Logits that depend on each row alone, to the last bit, however rows are batched."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Identity()

    def forward(self, batch: ExampleBatch) -> Tensor:
        row_B = batch.row_B.float()
        x_BD = torch.stack([torch.sin(7.0 * row_B), torch.cos(3.0 * row_B), row_B], dim=1)
        return self.heads(x_BD)[:, :2]


def score(world: World, config, folder):
    reader = open_reader(folder, config.data, batch_size=27, rank=world.rank, world_size=world.size)
    kept: list[Predictions] = []
    model = RowModel().train()
    block = evaluate(
        model,
        reader.batches("train"),
        reader.schema,
        world,
        precision=nullcontext,
        sink=kept.append,
        embeddings=True,
    )
    assert model.training
    assert not model.heads._forward_pre_hooks
    columns = [
        np.concatenate([getattr(part, name) for part in kept]) for name in Predictions.__slots__
    ]
    return block.report(), columns, [len(part.row_B) for part in kept]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_give_the_digits_and_the_rows_of_one(tiny, data_root, world_size):
    # 27 examples do not divide by the ranks, and the last batch has one: some ranks have none.
    config = tiny("data.max_rows=55")
    folder = default_folder(config.data, data_root)
    prepare("synthetic", folder, options=config.data.synthetic)
    report, columns, sizes = score(World(), config, folder)
    assert sizes == [27, 27, 1]
    row_B, *_, heads_BD = columns
    assert row_B.tolist() == list(range(55))
    assert np.array_equal(heads_BD[:, 2], row_B.astype(np.float32))
    assert 0.0 < report["click"]["auc"] < 1.0
    for of_rank in run_ranks(score, world_size, config, folder):
        assert of_rank[0] == report  # every digit of every metric
        assert of_rank[2] == sizes
        for got, wanted in zip(of_rank[1], columns, strict=True):
            assert np.array_equal(got, wanted, equal_nan=got.dtype.kind == "f")
