"""Train a table for one step with only this package's wheels installed; exit 1 if it is wrong."""

import sys

import torch

from gem_embeddings.contract import OptimizerSpec, TableSpec
from gem_embeddings.optimizer import table_optimizer
from gem_embeddings.tables import EmbeddingTables
from gem_jagged.batch import Jagged


def main() -> int:
    spec = TableSpec(name="item", embedding_dim=2, num_embeddings=4, feature_names=("liked",))
    tables = EmbeddingTables([spec])
    optimizer = table_optimizer(tables.table_parameters(), OptimizerSpec(lr=0.5))
    before = tables.weights["item"].detach().clone()
    liked = Jagged.from_list([torch.tensor([1, 3, 1]), torch.tensor([], dtype=torch.int64)])
    pooled = tables({"liked": liked})["liked"]
    right = torch.allclose(pooled[0], 2 * before[1] + before[3]) and not pooled[1].any()
    pooled.sum().backward()
    optimizer.step()
    # Row-wise Adagrad moves each seen row by lr on its first step, as all its gradients are equal.
    moved = torch.tensor([[0.0], [0.5], [0.0], [0.5]]).expand(4, 2)
    right = right and torch.allclose(before - tables.weights["item"], moved, atol=1e-6)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
