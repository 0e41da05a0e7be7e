"""A model's fingerprint, by which whoever reads what it wrote knows that it was this very model.

Embeddings of two models are vectors of two spaces, however alike their recipes are. So all weights
decide, tables included, and nothing else does: neither the folder, nor when or by whom it was read.
"""

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

_PIECE = 1 << 24


def model_fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Hash the weights of a model.

    Args:
        tensors: name -> weight; its order does not matter.

    Returns:
        SHA-256 over name, dtype, shape and bytes of each, sorted by name, as hex digits.

    Cost: every byte is read once, in pieces, on one core.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        for piece in tensor.reshape(-1).split(_PIECE):
            plain = piece.cpu().contiguous().view(torch.uint8).numpy()
            digest.update(np.ascontiguousarray(plain).data)
    return digest.hexdigest()


def fingerprint_of(model: nn.Module) -> str:
    """Hash the parameters of a model that lies whole on this process.

    Args:
        model: from `gem.model.build.build_model`, with the weights that it scores with. Buffers do
            not count: they are counts of ids, or follow from the settings.

    Returns:
        as `model_fingerprint`.
    """
    return model_fingerprint(dict(model.named_parameters()))
