"""Launchers of ``jagged_take_last``: rows are moved by the kernels of ``gem_jagged.moves``."""

from gem_jagged.moves.kernel import launch_tail


def launch_forward(values_TD, offsets_O, kept_offsets_O, kept_tokens):
    """Keep the last tokens of each sequence."""
    return launch_tail(values_TD, offsets_O, kept_offsets_O, kept_tokens)


def launch_backward(grad_SD, offsets_O, kept_offsets_O, total_tokens):
    """Give the kept tokens their gradient, the others 0."""
    return launch_tail(grad_SD, kept_offsets_O, offsets_O, total_tokens)
