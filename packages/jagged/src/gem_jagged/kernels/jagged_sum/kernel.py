"""Launchers of ``jagged_sum``: the kernels are those of ``gem_jagged.sums``."""

from gem_jagged.sums.kernel import launch_spread, launch_sum


def launch_forward(values_TD, offsets_O):
    """Sum the tokens of each sequence."""
    return launch_sum(values_TD, offsets_O, mean=False)


def launch_backward(grad_BD, offsets_O, total_tokens):
    """Spread the gradient of each sum over the tokens of its sequence."""
    return launch_spread(grad_BD, offsets_O, total_tokens, mean=False)
