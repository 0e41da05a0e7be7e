"""What a call costs: FLOPs and bytes from plain integers, and the time they need at best.

Every operator has a ``cost.py`` whose function returns a ``Cost`` from ints. The forecast, the
benchmarks and torch's FLOP counter all use that one function. Imports no torch; only
``register_flops`` does, when it is called.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gem_opkit.errors import ConfigError, refusal


@dataclass(frozen=True, slots=True)
class Cost:
    """FLOPs and bytes of a call.

    Attributes:
        flops: floating point operations, a multiply-add counted as 2; only what the result needs
            (valid tokens, visible pairs), no recomputation.
        bytes: the fewest bytes that must move to or from device memory: each input read once,
            each output written once.
    """

    flops: int
    bytes: int

    def __post_init__(self) -> None:
        for name, value in (("flops", self.flops), ("bytes", self.bytes)):
            if value < 0:
                raise ConfigError(
                    refusal("Cost", name, must="be at least 0", got=value, fix="check the lengths")
                )

    def __add__(self, other: "Cost | int") -> "Cost":
        """Add two costs; 0 is accepted so that ``sum`` works."""
        if isinstance(other, Cost):
            return Cost(self.flops + other.flops, self.bytes + other.bytes)
        return self if other == 0 else NotImplemented

    __radd__ = __add__

    def __mul__(self, factor: float) -> "Cost":
        """Scale both parts, rounded to whole FLOPs and bytes."""
        if not isinstance(factor, int | float):
            return NotImplemented
        return Cost(round(self.flops * factor), round(self.bytes * factor))

    __rmul__ = __mul__

    def roofline_ms(self, peak_flops_per_s: float, bytes_per_s: float) -> float:
        """Return the least time that this cost can take on a device.

        Args:
            peak_flops_per_s: matmul rate of the device, FLOP/s, above 0.
            bytes_per_s: memory bandwidth of the device, above 0.

        Returns:
            max(FLOPs / rate, bytes / bandwidth) in milliseconds.

        Raises:
            ConfigError: a rate that is not above 0.
        """
        rates = (("peak_flops_per_s", peak_flops_per_s), ("bytes_per_s", bytes_per_s))
        for name, value in rates:
            if not value > 0:
                raise ConfigError(
                    refusal(
                        "Cost.roofline_ms",
                        name,
                        must="be above 0",
                        got=value,
                        fix="measure it with gem_opkit.ceilings",
                    )
                )
        return 1e3 * max(self.flops / peak_flops_per_s, self.bytes / bytes_per_s)


def register_flops(op: Any, formula: Callable[..., "Cost | int"]) -> None:
    """Teach torch's FLOP counter what a custom op costs.

    Register the forward and the backward op each with its own formula. The formula gets the op's
    raw arguments (tensors, possibly fake ones), so take lengths from host ints among them; a
    formula that reads offsets from a tensor fails on fake tensors.

    Args:
        op: a custom op (what ``torch.library.custom_op`` returns), an ``OpOverloadPacket``, an
            ``OpOverload``, or a name like ``"gem_jagged::jagged_mean"``.
        formula: called with the op's positional and keyword arguments; returns a ``Cost`` or a
            number of FLOPs.

    Raises:
        ConfigError: a name without ``::``.
    """
    from torch.utils.flop_counter import register_flop_formula

    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        cost = formula(*args, **kwargs)
        return cost.flops if isinstance(cost, Cost) else int(cost)

    register_flop_formula(op_packet(op), get_raw=True)(count)


def op_packet(op: Any) -> Any:
    """Return the ``OpOverloadPacket`` of a custom op given in any of the usual forms.

    Args:
        op: as in ``register_flops``.

    Returns:
        the packet, for example ``torch.ops.gem_jagged.jagged_mean``.

    Raises:
        ConfigError: a name without ``::``.
    """
    import torch

    if isinstance(op, str):
        namespace, colons, name = op.partition("::")
        if not colons or not name:
            raise ConfigError(
                refusal(
                    "register_flops",
                    "op",
                    must="be a name like 'gem_jagged::jagged_mean'",
                    got=repr(op),
                    fix="give namespace and name",
                )
            )
        return getattr(getattr(torch.ops, namespace), name.partition(".")[0])
    op = getattr(op, "_opoverload", op)  # a CustomOpDef holds its OpOverload there
    return getattr(op, "overloadpacket", op)
