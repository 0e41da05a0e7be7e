"""Rotary embeddings: positions, and time gaps, as rotations of queries and keys.

Columns 2f and 2f + 1 of a head form pair f, which is turned by an angle of its own. The score of
a query and a key then depends on the difference of their angles alone.
"""

import torch
from torch import Tensor

from gem_opkit.dims import check_shapes
from gem_opkit.errors import (
    ConfigError,
    DeviceError,
    ShapeError,
    UnsupportedError,
    refusal,
)

# Of the position's frequencies, and of the log gap's.
_BASE, _TIME_BASE = 10_000.0, 100.0


def _frequencies(
    op: str,
    head_dim: int,
    base: float,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    if head_dim <= 0 or head_dim % 2:
        raise ShapeError(
            refusal(
                op,
                "head_dim",
                must="be even and above 0",
                got=head_dim,
                fix="pairs of columns are rotated",
            )
        )
    pair = torch.arange(head_dim // 2, dtype=dtype, device=device)
    return base ** (-2.0 * pair / head_dim)


def rotary_angles(
    position_T: Tensor, head_dim: int, *, base: float = _BASE
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of each token's angles by its position.

        angle[t, f] = position[t] · base^(−2f/K)

    Args:
        position_T: position of each token in its sequence (``gem_jagged.offsets.positions``),
            any numeric dtype.
        head_dim: width K of a head, even.
        base: how much slower the last pair turns than the first, above 1.

    Returns:
        cos and sin, float32 (T, K/2).

    Raises:
        ShapeError: an odd head width.

    Numerics: angles in float32; exact to 10⁻³ up to positions of 10⁴.
    Cost: T·K/2 sines and cosines, counted as 0 FLOPs.
    Source: Su et al. 2021 (arXiv:2104.09864).
    """
    check_shapes("rotary_angles", position_T=position_T)
    frequency = _frequencies("rotary_angles", head_dim, base, position_T.device)
    angle = position_T.to(torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


def rote_angles(
    position_T: Tensor,
    gap_seconds_T: Tensor,
    head_dim: int,
    *,
    time_scale_s: float = 60.0,
    base: float = _BASE,
    time_base: float = _TIME_BASE,
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of each token's angles by its position and its log time gap (ROTE).

        angle[t, f] = position[t] · base^(−2f/K) + ln(1 + gap[t]/time_scale) · time_base^(−2f/K)

    The gap is that between the event and the request, so that two events' angles differ by how
    far apart they lie in the order *and* in the logarithm of their age. The published
    description names both terms; the frequencies of the second are this project's choice: a
    logarithm spans about 15 where positions span thousands, so its slowest pair turns faster.

    Args:
        position_T: position of each token in its sequence.
        gap_seconds_T: seconds from the event to the request, at least 0.
        head_dim: width K of a head, even.
        time_scale_s: gaps well below it hardly turn, above 0.
        base: of the position's frequencies, above 1.
        time_base: of the log gap's frequencies, above 1.

    Returns:
        cos and sin, float32 (T, K/2).

    Raises:
        ShapeError: an odd head width, or different numbers of tokens.

    Numerics: angles in float32.
    Cost: T·K/2 sines and cosines, counted as 0 FLOPs.
    Source: the Kunlun article for the two terms.
    """
    check_shapes("rote_angles", position_T=position_T, gap_seconds_T=gap_seconds_T)
    device = position_T.device
    by_position = _frequencies("rote_angles", head_dim, base, device)
    by_time = _frequencies("rote_angles", head_dim, time_base, device)
    log_gap = torch.log1p(gap_seconds_T.to(torch.float32) / time_scale_s)
    angle = position_T.to(torch.float32)[:, None] * by_position + log_gap[:, None] * by_time
    return angle.cos(), angle.sin()


def turn_rates(
    op: str, head_dim: int, *, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return how fast each pair turns, for operators that make the angles themselves.

        angle[t, f] = position[t] · rates[0, f] + ln(1 + gap[t]/time_scale) · rates[1, f]

    Args:
        op: name of the operator, for the message.
        head_dim: width K of a head, even.
        device: of the result.
        dtype: of the result.

    Returns:
        rates (2, K/2) with the bases of ``rotary_angles`` and ``rote_angles``.

    Raises:
        ShapeError: an odd head width.
    """
    bases = (_BASE, _TIME_BASE)
    return torch.stack([_frequencies(op, head_dim, base, device, dtype) for base in bases])


def apply_rotary(x_THK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of columns by its token's angle.

        (y[2f], y[2f+1]) = (x[2f] cos − x[2f+1] sin, x[2f] sin + x[2f+1] cos)

    Args:
        x_THK: queries or keys, K even, float32, float64, bfloat16 or float16.
        cos: cosine of each token's angles (T, K/2).
        sin: sine of each token's angles (T, K/2).

    Returns:
        y_THK in the dtype of x.

    Raises:
        ShapeError: angles that do not fit x.

    Numerics: rotates in float32 (float64 for float64).
    Cost: one pass over x, counted as 0 FLOPs.
    Source: Su et al. 2021 (arXiv:2104.09864).
    """
    op = "apply_rotary"
    check_shapes(op, x_THK=x_THK)
    tokens, heads, width = x_THK.shape
    for name, part in (("cos", cos), ("sin", sin)):
        if part.ndim != 2 or part.shape[0] != tokens or 2 * part.shape[1] != width:
            raise ShapeError(
                refusal(
                    op,
                    name,
                    must=f"have shape ({tokens}, {width}/2)",
                    got=tuple(part.shape),
                    fix="make it with rotary_angles or rote_angles for these tokens",
                )
            )
    wide = torch.float64 if x_THK.dtype == torch.float64 else torch.float32
    # A pair is a complex number and the rotation one product: a third of the time, on a CPU, of
    # multiplying and adding the halves.
    pairs = torch.view_as_complex(x_THK.to(wide).contiguous().view(tokens, heads, width // 2, 2))
    turn = torch.complex(cos.to(wide), sin.to(wide))
    return torch.view_as_real(pairs * turn[:, None]).view(tokens, heads, width).to(x_THK.dtype)


def check_gaps(
    op: str, gap_seconds_T: Tensor, time_scale_s: float, *, like: str, device: torch.device
) -> None:
    """Refuse time gaps that a kernel which makes the angles itself cannot take.

    Args:
        op: operator, for errors.
        gap_seconds_T: seconds from each event to the request; their number is checked elsewhere.
        time_scale_s: gap, in seconds, that turns by log 2.
        like: name of the operand whose device they have to share.
        device: that device.

    Raises:
        DeviceError: gaps elsewhere.
        UnsupportedError: gaps that require a gradient.
        ConfigError: a scale that is not above 0.
    """
    if gap_seconds_T.device != device:
        raise DeviceError(
            refusal(
                op,
                "gap_seconds_T",
                must=f"be on {device} like {like}",
                got=gap_seconds_T.device,
                fix="move it",
            )
        )
    if gap_seconds_T.requires_grad:
        raise UnsupportedError(
            refusal(
                op,
                "gap_seconds_T",
                must="require no gradient",
                got="one that does",
                fix="detach it, or turn q and k by rote_angles and apply_rotary before the call",
            )
        )
    if not time_scale_s > 0:
        raise ConfigError(
            refusal(
                op,
                "rote_time_scale_s",
                must="be above 0",
                got=time_scale_s,
                fix="60 is usual: gaps well below it hardly turn",
            )
        )
