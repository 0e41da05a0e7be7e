"""Launchers of ``jagged_concat``: rows are moved by the kernels of ``gem_jagged.moves``."""

from gem_jagged.moves.kernel import launch_join, launch_part


def launch_forward(left_TD, left_offsets_O, right_SD, right_offsets_O):
    """Append to each sequence of the left that of the right."""
    return launch_join(left_TD, right_SD, left_offsets_O, right_offsets_O)


def launch_backward(grad_TD, left_offsets_O, right_offsets_O, left_tokens):
    """Take the gradients of the two sides out of that of the result."""
    return launch_part(grad_TD, left_offsets_O, right_offsets_O, left_tokens)
