"""Launchers of ``jagged_split``: rows are moved by the kernels of ``gem_jagged.moves``."""

from gem_jagged.moves.kernel import launch_join, launch_part


def launch_forward(values_TD, left_offsets_O, right_offsets_O, left_tokens):
    """Cut each sequence into its left and its right part."""
    return launch_part(values_TD, left_offsets_O, right_offsets_O, left_tokens)


def launch_backward(grad_left_TD, grad_right_SD, left_offsets_O, right_offsets_O):
    """Put the gradients of the two parts back in their places."""
    return launch_join(grad_left_TD, grad_right_SD, left_offsets_O, right_offsets_O)
