"""The mathematics of ``grouped_linear`` in plain torch.

Rows of x are sorted by expert: those of expert e lie from offsets[e] up to offsets[e + 1]. Each is
mapped by the weight of its expert,

    y[t] = W[e] x[t],        dx[t] = W[e]ᵀ dy[t],        dW[e] = Σ_{t of e} dy[t] x[t]ᵀ

Rows from the last offset on belong to nobody: they are not read, and their y and dx are zeros. The
gradient of an expert without rows is exactly zero.

Source: the grouped product of mixture-of-experts layers, e.g. MegaBlocks (arXiv:2211.15841); here
no router chooses the rows.
"""

import torch
from torch import Tensor


def grouped_linear_reference(x_TD: Tensor, weight_XFD: Tensor, offsets_O: Tensor) -> Tensor:
    """Return y_TF; arguments as in the operator."""
    parts = [
        (wide(x_TD[start:end]) @ wide(weight_FD).T).to(x_TD.dtype)
        for start, end, weight_FD in _experts(weight_XFD, offsets_O)
    ]
    rest = x_TD.shape[0] - int(offsets_O[-1])
    return torch.cat([*parts, x_TD.new_zeros(rest, weight_XFD.shape[1])])


def grouped_linear_backward_reference(
    grad_TF: Tensor, x_TD: Tensor, weight_XFD: Tensor, offsets_O: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weights."""
    grad_x_TD = grouped_linear_reference(grad_TF, weight_XFD.transpose(1, 2), offsets_O)
    grads = [
        wide(grad_TF[start:end]).T @ wide(x_TD[start:end])
        for start, end, _ in _experts(weight_XFD, offsets_O)
    ]
    grad_weight_XFD = torch.stack(grads) if grads else torch.zeros_like(weight_XFD)
    return grad_x_TD.to(x_TD.dtype), grad_weight_XFD.to(weight_XFD.dtype)


def wide(x: Tensor) -> Tensor:
    """Return numbers of 16 bits in fp32, others as they are."""
    return x.float() if x.element_size() < 4 else x


def _experts(weight_XFD: Tensor, offsets_O: Tensor) -> list[tuple[int, int, Tensor]]:
    edges = offsets_O.tolist()
    return list(zip(edges, edges[1:], weight_XFD.unbind(), strict=False))
