"""The ways to even out the work of ranks, as a recipe names them. No torch, no numpy."""

from typing import Literal

# off: every rank takes the rows that follow one another in the log.
# local: the same rows, in an order that gives each micro-batch of a rank as much work.
# within_group: base batches change ranks within a group of neighbours alone.
# group: the same, and then between groups where that is not enough.
# global: base batches go to any rank.
Variant = Literal["off", "local", "within_group", "group", "global"]
