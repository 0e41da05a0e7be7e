"""Model FLOPs utilisation: what the devices did of what they could do.

    e2e_mfu = model FLOPs of a step / (GPUs x BF16 dense peak x step time)

Model FLOPs are those of valid tokens and visible pairs, forward and backward, without
recomputation, as `gem.model.flops` counts them. The peak is that of `gem_opkit.ceilings`: for a
device that is not in its table the result is null, never a guess.
"""

from typing import Any

from gem_opkit.ceilings import device_peak, share_of_peak


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
        step_ms: median time of a step, milliseconds, above 0; None where no step was timed.
        device_name: as ``torch.cuda.get_device_name`` gives it, or ``cpu``.
        world_size: devices.

    Returns:
        ``{e2e_mfu, local_mfu, scaling_ratio, weak_scaling, flops_per_example, peak_tflops,
        peak_source}``. The second to fourth are null: training alone does not measure them.

    Raises:
        MeasurementError: more than the peak, so that a FLOP count, a time or the peak is wrong.
    """
    peak = device_peak(device_name)
    mfu = None
    if flops_per_example is not None and step_ms and peak.flops_per_s is not None:
        flops = flops_per_example * examples_per_step
        mfu = share_of_peak(flops, step_ms, world_size * peak.flops_per_s)
    return {
        "e2e_mfu": mfu,
        "local_mfu": None,
        "scaling_ratio": None,
        "weak_scaling": None,
        "flops_per_example": flops_per_example,
        "peak_tflops": None if peak.flops_per_s is None else peak.flops_per_s / 1e12,
        "peak_source": None if peak.flops_per_s is None else peak.peak_source,
    }
