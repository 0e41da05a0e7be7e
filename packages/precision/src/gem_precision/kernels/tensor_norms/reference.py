"""The mathematics of ``tensor_norms`` in plain torch, tensor by tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor


def tensor_norms_reference(tensors: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of each tensor.

        norm[i] = sqrt(Σ x²) over all elements x of tensor i

    Args:
        tensors: at least one, of floating point, any shapes.

    Returns:
        (len(tensors),) in fp32, or fp64 where one of them is; 0 for a tensor without elements.
    """
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    return torch.stack([torch.linalg.vector_norm(t, dtype=wide) for t in tensors])
