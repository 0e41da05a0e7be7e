"""Launchers of ``padded_to_jagged``: rows are moved by the kernels of ``gem_jagged.moves``."""

from gem_jagged.moves.kernel import launch_pad, launch_unpad


def launch_forward(padded_BND, offsets_O, total_tokens, align):
    """Pack the tokens of a padded batch."""
    return launch_unpad(padded_BND, offsets_O, total_tokens, align)


def launch_backward(grad_TD, offsets_O, length, align):
    """Move the gradients of tokens back to their slots; 0 in the others."""
    return launch_pad(grad_TD, offsets_O, length, 0.0, align)
