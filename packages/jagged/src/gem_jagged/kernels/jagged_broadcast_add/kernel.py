"""Launchers of ``jagged_broadcast_add``: the kernels are those of ``gem_jagged.sums``."""

from gem_jagged.sums.kernel import launch_spread, launch_sum


def launch_forward(values_TD, offsets_O, dense_BD):
    """Add to each token the row of its sequence."""
    tokens = values_TD.shape[0]
    return launch_spread(dense_BD, offsets_O, tokens, mean=False, values_TD=values_TD)


def launch_backward(grad_TD, offsets_O):
    """Sum the gradients of each sequence's tokens."""
    return launch_sum(grad_TD, offsets_O, mean=False)
