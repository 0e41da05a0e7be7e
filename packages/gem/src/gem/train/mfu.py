"""Model FLOPs utilisation: what the device did of what it could do.

    e2e_mfu = model FLOPs of a step / (GPUs x BF16 dense peak x step time)

Model FLOPs are those of valid tokens and visible pairs, forward and backward, without
recomputation, as `gem.model.flops` counts them. The peak is known only for the devices in the
table: elsewhere the result is null, never a guess.
"""

import re
from typing import Any

from gem_opkit.errors import DeviceError, refusal

# BF16 dense peak, TFLOP/s, without sparsity, by words of torch's name of the device. The longer
# name stands first where one is a part of the other.
_PEAKS: tuple[tuple[str, float], ...] = (
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100 80GB HBM3", 989.0),
    ("A100", 312.0),
    ("B200", 2250.0),
)


def peak_tflops(device_name: str) -> tuple[float | None, str | None]:
    """The BF16 dense peak of a device.

    Args:
        device_name: as ``torch.cuda.get_device_name`` gives it, or ``cpu``.

    Returns:
        TFLOP/s and where the number is from; (None, None) for a device that is not in the table.
    """
    if not device_name.startswith("NVIDIA "):
        return None, None
    for part, tflops in _PEAKS:
        if re.search(rf"\b{re.escape(part)}\b", device_name):
            return tflops, f"data sheet of NVIDIA {part}, BF16 dense"
    return None, None


def e2e_mfu(
    flops_per_step: float, step_ms: float, world_size: int, peak: float | None
) -> float | None:
    """End-to-end model FLOPs utilisation.

    Args:
        flops_per_step: model FLOPs of a step over all ranks.
        step_ms: time of a step, milliseconds, above 0.
        world_size: devices.
        peak: BF16 dense peak of one device, TFLOP/s; None where it is not known.

    Returns:
        A share in (0, 1], or None without a peak.

    Raises:
        DeviceError: the share is above 1: a wrong peak, time or FLOP formula, not a result.
    """
    if peak is None:
        return None
    share = flops_per_step / (world_size * peak * 1e12 * step_ms * 1e-3)
    if share > 1.0:
        raise DeviceError(
            refusal(
                "mfu",
                "e2e_mfu",
                must="be at most 1",
                got=f"{share:.3f} from {flops_per_step:.4g} FLOPs a step of {step_ms:.4g} ms on "
                f"{world_size} devices of {peak} TFLOP/s",
                fix="check the peak, the clock and the FLOP formulas",
            )
        )
    return share


def efficiency(
    *,
    flops_per_example: float | None,
    examples_per_step: float,
    step_ms: float | None,
    device_name: str,
    world_size: int,
) -> dict[str, Any]:
    """The ``efficiency`` table of ``summary.json``.

    Args:
        flops_per_example: model FLOPs of an example, forward and backward; None if not counted.
        examples_per_step: over all ranks.
        step_ms: median time of a step; None where no step was timed.
        device_name: as in `peak_tflops`.
        world_size: devices.

    Returns:
        ``{e2e_mfu, local_mfu, scaling_ratio, weak_scaling, flops_per_example, peak_tflops,
        peak_source}``. The second to fourth are null: training alone does not measure them.

    Raises:
        DeviceError: as `e2e_mfu`.
    """
    peak, source = peak_tflops(device_name)
    mfu = None
    if flops_per_example is not None and step_ms:
        mfu = e2e_mfu(flops_per_example * examples_per_step, step_ms, world_size, peak)
    return {
        "e2e_mfu": mfu,
        "local_mfu": None,
        "scaling_ratio": None,
        "weak_scaling": None,
        "flops_per_example": flops_per_example,
        "peak_tflops": peak,
        "peak_source": source,
    }
