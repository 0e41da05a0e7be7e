"""Cost of one call of ``mx_attention``, from plain ints: that of attention in 16 bits.

The products are those of ``jagged_flash_attention``. What is written and read again in 8 bits is no
part of it: a kernel before could have written it.
"""

from gem_attention.kernels.jagged_flash_attention.cost import (
    jagged_flash_attention_backward_cost as mx_attention_backward_cost,
)
from gem_attention.kernels.jagged_flash_attention.cost import (
    jagged_flash_attention_cost as mx_attention_cost,
)

__all__ = ["mx_attention_backward_cost", "mx_attention_cost"]
