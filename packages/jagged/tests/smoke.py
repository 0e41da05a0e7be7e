"""Run one operator with only this package's wheels installed; exit status 1 if it is wrong."""

import sys

import torch

from gem_jagged.batch import Jagged
from gem_jagged.ops import jagged_mean, jagged_to_padded


def main() -> int:
    batch = Jagged.from_list([torch.tensor([[1.0], [3.0]]), torch.zeros(0, 1)]).checked("values")
    values = batch.values.requires_grad_()
    padded = jagged_to_padded(values, batch.layout, fill=-1.0)
    mean = jagged_mean(values, batch.layout)
    mean.sum().backward()
    right = (
        padded.tolist() == [[[1.0], [3.0]], [[-1.0], [-1.0]]]
        and mean.tolist() == [[2.0], [0.0]]
        and values.grad is not None
        and values.grad.tolist() == [[0.5], [0.5]]
    )
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
