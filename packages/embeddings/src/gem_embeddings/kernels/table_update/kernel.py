"""Launcher of ``table_update``: the kernels are those of ``gem_embeddings.merging``."""

import torch

from gem_embeddings.merging.kernel import launch_merge
from gem_embeddings.places import places_of
from gem_opkit.errors import UnsupportedError, refusal


def launch_update(
    weights_N, states, ids_I, bags_O, grad, id_weights_I, slots, counts, spec, *,
    lr, grad_scale, step, seed,
):  # fmt: skip
    """Merge gradients by row and move each row once."""
    for tensor in (weights_N, grad, id_weights_I):
        if tensor is not None and tensor.dtype == torch.float64:
            raise UnsupportedError(
                refusal(
                    "table_update",
                    "impl",
                    must='be "reference" for fp64',
                    got="a Triton kernel",
                    fix="use fp32 tables, or the reference",
                )
            )
    is_adam = spec.kind == "adam"
    launch_merge(
        weights_N, states, ids_I, bags_O, grad, id_weights_I,
        places_of("table_update", slots, weights_N.device),
        rule=spec.kind, eps=spec.eps, beta1=spec.beta1, beta2=spec.beta2,
        lr=lr / (1 - spec.beta1**step) if is_adam else lr,
        correction=1 - spec.beta2**step if is_adam else 1.0,
        moment_scale=spec.moment_scale, grad_scale=grad_scale, seed=seed, step=step,
    )  # fmt: skip
