"""Launchers of ``jagged_to_padded``: rows are moved by the kernels of ``gem_jagged.moves``."""

from gem_jagged.moves.kernel import launch_pad, launch_unpad


def launch_forward(values_TD, offsets_O, length, fill, align):
    """Pad every sequence to ``length``."""
    return launch_pad(values_TD, offsets_O, length, fill, align)


def launch_backward(grad_BND, offsets_O, total_tokens, align):
    """Move the gradients of padded slots back to their tokens; 0 for tokens that were cut off."""
    return launch_unpad(grad_BND, offsets_O, total_tokens, align)
