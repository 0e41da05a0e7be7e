"""What both kernels of a narrow window share: their slots, and how they are given back."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Warpgroups that compute, and items whose operands have room.
CONSUMERS = gl.constexpr(2)
SLOTS = gl.constexpr(2)


@gluon.jit
def slot_of(turn, PART: gl.constexpr):
    """Return where a turn's operands of one part lie."""
    return (turn % SLOTS) * CONSUMERS + PART


@gluon.jit
def release(empty, turn, PART: gl.constexpr):
    """Give back the memory of the turn before, when what left through it has left."""
    tma.store_wait(0)
    mbarrier.arrive(empty.index(slot_of(turn + SLOTS - 1, PART)), count=1, pred=turn > 0)
