"""Run one layer with only this package's wheels installed; exit status 1 if it is wrong."""

import sys

import torch

from gem_precision.contract import PrecisionRecipe
from gem_precision.layers import RmsNorm, apply_recipe


def main() -> int:
    x_TD = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    with apply_recipe(PrecisionRecipe(), "cpu")():
        y_TD = RmsNorm(2)(x_TD)
    expected_TD = x_TD / torch.tensor([[12.5**0.5], [1.0]])
    return 0 if torch.allclose(y_TD, expected_TD, atol=1e-5) else 1


if __name__ == "__main__":
    sys.exit(main())
