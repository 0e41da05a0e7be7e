"""What a device can do at best: measured ceilings, and the peaks of data sheets.

The *ceiling* is measured on the device at hand: the bandwidth of a large copy and the rate of a
large matmul. The *peak* is the vendor's figure and the denominator of MFU. A device that is not
in the table has no peak: None, never a guess. Importing this file imports no torch.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from gem_opkit.cost import Cost
from gem_opkit.errors import ConfigError, MeasurementError, UnsupportedError, refusal

MatmulDtype = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True, slots=True)
class Peak:
    """What the vendor says of a device.

    Attributes:
        flops_per_s: dense BF16 FLOP/s of matmuls, or None where the device is unknown.
        peak_source: where the figure is from, or why there is none.
        bytes_per_s: memory bandwidth of the same data sheet, or None.
        fp8_over_bf16: FP8 rate of the same data sheet over its BF16 rate; 1 where it has none.
    """

    flops_per_s: float | None
    peak_source: str
    bytes_per_s: float | None = None
    fp8_over_bf16: float = 1.0


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What one device reached when it was measured.

    Attributes:
        device: name of the device.
        matmul_dtype: number format of the matmul.
        copy_bytes_per_s: bytes read plus bytes written per second in a large copy.
        matmul_flops_per_s: FLOP/s of a large square matmul.
    """

    device: str
    matmul_dtype: str
    copy_bytes_per_s: float
    matmul_flops_per_s: float


# Whole names only: a variant (H100 PCIe, H200 NVL, a MIG slice) has another peak, and H20 is not
# an H200. Data sheets print the figure with 2:4 sparsity, twice the dense one; all that have FP8
# print twice BF16's figure for it.
_PEAKS: tuple[tuple[str, float, str, float, float], ...] = (
    (
        r"NVIDIA H100 (80GB HBM3|SXM5?( 80GB)?)",
        989e12,
        "NVIDIA H100 data sheet, SXM: 1,979 TFLOP/s BF16 with sparsity, halved",
        3.35e12,
        2.0,
    ),
    (
        r"NVIDIA H200",
        989e12,
        "NVIDIA H200 data sheet, SXM: 1,979 TFLOP/s BF16 with sparsity, halved",
        4.8e12,
        2.0,
    ),
    (
        r"NVIDIA B200",
        2250e12,
        "NVIDIA HGX B200 data sheet: 36 PFLOP/s BF16 with sparsity for 8 GPUs, halved",
        8e12,
        2.0,
    ),
    (
        r"(NVIDIA )?A100-(SXM4|SXM|PCIE|PCIe)-(40|80)GB|NVIDIA A100 80GB PCIe",
        312e12,
        "NVIDIA A100 data sheet: 312 TFLOP/s BF16 dense",
        2.039e12,  # of the fastest, SXM with 80 GB
        1.0,
    ),
)


def device_peak(device_name: str) -> Peak:
    """Look up the dense BF16 peak of a device.

    Args:
        device_name: as ``torch.cuda.get_device_name`` gives it.

    Returns:
        the peak; ``flops_per_s`` is None for a name that is not in the table.
    """
    for pattern, flops_per_s, source, bytes_per_s, fp8_over_bf16 in _PEAKS:
        if re.fullmatch(pattern, device_name.strip()):
            return Peak(flops_per_s, source, bytes_per_s, fp8_over_bf16)
    return Peak(None, f"no peak known for {device_name!r}")


def share_of_peak(flops: float, elapsed_ms: float, peak_flops_per_s: float | None) -> float | None:
    """Return the share of a peak that was reached: MFU, when ``flops`` are the model's.

    Args:
        flops: work done, at least 0.
        elapsed_ms: time it took, above 0.
        peak_flops_per_s: peak of all devices together; None where unknown.

    Returns:
        a share from 0 to 1, or None where the peak is unknown.

    Raises:
        MeasurementError: more than the peak: time, unit or FLOP count is wrong.
        ConfigError: a time or a peak that is not above 0.
    """
    if not elapsed_ms > 0:
        raise ConfigError(
            refusal("share_of_peak", "elapsed_ms", must="be above 0", got=elapsed_ms, fix="time it")
        )
    if peak_flops_per_s is None:
        return None
    if not peak_flops_per_s > 0:
        raise ConfigError(
            refusal(
                "share_of_peak",
                "peak_flops_per_s",
                must="be above 0, or None where unknown",
                got=peak_flops_per_s,
                fix="take it from device_peak",
            )
        )
    share = flops / (elapsed_ms * 1e-3) / peak_flops_per_s
    if share > 1:
        raise MeasurementError(
            refusal(
                "share_of_peak",
                "share",
                must="be at most 1",
                got=f"{share:.3f} ({flops:.4g} FLOPs in {elapsed_ms:.4g} ms)",
                fix="check synchronisation, units, the FLOP count and the peak",
            )
        )
    return share


def share_of_ceiling(cost: Cost, elapsed_ms: float, ceilings: Ceilings) -> float:
    """Return how near a call came to the roofline of its device.

    The bandwidth of the roofline is that of a copy, which reads as much as it writes. Memory reads
    faster than it writes, so a call that reads more than it writes may come out a little above 1.
    What no call can beat is the data sheet.

    Args:
        cost: FLOPs and fewest bytes of the call.
        elapsed_ms: time it took, above 0.
        ceilings: measured on the same device.

    Returns:
        roofline time / elapsed time, from 0 to 1; above it at most by the distance of the measured
        ceilings from the data sheet.

    Raises:
        MeasurementError: faster than the data sheet, or, of a device without one, than the
            roofline.
    """
    sheet = device_peak(ceilings.device)
    roofline_ms = cost.roofline_ms(ceilings.matmul_flops_per_s, ceilings.copy_bytes_per_s)
    least_ms = cost.roofline_ms(
        max(ceilings.matmul_flops_per_s, sheet.flops_per_s or 0.0),
        max(ceilings.copy_bytes_per_s, sheet.bytes_per_s or 0.0),
    )
    if least_ms > elapsed_ms:
        raise MeasurementError(
            refusal(
                "share_of_ceiling",
                "share",
                must="be at most 1",
                got=f"{least_ms / elapsed_ms:.3f} (roofline {least_ms:.4g} ms, "
                f"measured {elapsed_ms:.4g} ms)",
                fix="check synchronisation and the cost formula, or take a case larger than the "
                "caches; on a busy machine measure again",
            )
        )
    return roofline_ms / elapsed_ms


def device_name(device: Any = "cpu") -> str:
    """Return the name of a device as results and peaks know it.

    Args:
        device: a torch device or its name.

    Returns:
        ``"cpu"``, or what the CUDA driver calls the GPU.
    """
    import torch

    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


_measured: dict[tuple[str, str], Ceilings] = {}


def measure_ceilings(
    device: Any = "cpu", *, matmul_dtype: MatmulDtype | None = None, again: bool = False
) -> Ceilings:
    """Measure copy bandwidth and matmul rate of a device, once per process.

    The best of several repetitions counts, as for a ceiling it must, on random data (zeros make
    a GPU's matmul faster). Takes about a second.

    Args:
        device: a torch device or its name; cpu or cuda.
        matmul_dtype: number format of the matmul; default bf16 on CUDA, fp32 on a CPU.
        again: measure although it was done, and keep the better of each rate from now on.

    Returns:
        the ceilings.

    Raises:
        UnsupportedError: another kind of device.
    """
    import torch

    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(
            refusal(
                "measure_ceilings",
                "device",
                must="be cpu or cuda",
                got=device.type,
                fix="measure it with the vendor's tools",
            )
        )
    matmul_dtype = matmul_dtype or ("bf16" if device.type == "cuda" else "fp32")
    key = (str(device), matmul_dtype)
    before = _measured.get(key)
    if before is None or again:
        now = _measure(str(device), matmul_dtype)
        _measured[key] = now if before is None else _better(before, now)
    return _measured[key]


def _better(one: Ceilings, other: Ceilings) -> Ceilings:
    return replace(
        one,
        copy_bytes_per_s=max(one.copy_bytes_per_s, other.copy_bytes_per_s),
        matmul_flops_per_s=max(one.matmul_flops_per_s, other.matmul_flops_per_s),
    )


def _measure(device: str, matmul_dtype: str) -> Ceilings:
    import torch

    on_gpu = torch.device(device).type == "cuda"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[matmul_dtype]
    # Far beyond the caches: 50 MB of L2 on Hopper, some tens of MB of L3 on a CPU.
    copied_bytes = 2**30 if on_gpu else 2**27
    side = 8192 if on_gpu else 1024
    source = torch.zeros(copied_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    copy_ms = _best_ms(lambda: target.copy_(source), on_gpu=on_gpu)
    left = torch.randn(side, side, device=device).to(dtype)
    right = torch.randn(side, side, device=device).to(dtype)
    product = torch.zeros_like(left)
    matmul_ms = _best_ms(lambda: torch.mm(left, right, out=product), on_gpu=on_gpu)
    return Ceilings(
        device=device_name(device),
        matmul_dtype=matmul_dtype,
        copy_bytes_per_s=2 * copied_bytes / (copy_ms * 1e-3),
        matmul_flops_per_s=2 * side**3 / (matmul_ms * 1e-3),
    )


def _best_ms(run: Callable[[], Any], *, on_gpu: bool) -> float:
    import torch

    best = float("inf")
    for _ in range(3):
        run()
    for _ in range(20 if on_gpu else 7):
        if on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end))
        else:
            began = time.perf_counter()
            run()
            best = min(best, 1e3 * (time.perf_counter() - began))
    return best
