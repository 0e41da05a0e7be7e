import pytest
import torch

from gem_attention.rotary import apply_rotary, rotary_angles, rote_angles
from gem_opkit.errors import ShapeError
from gem_opkit.testing import check_refuses


def test_a_pair_is_turned_by_position_times_frequency():
    x = torch.tensor([[[1.0, 0.0, 0.0, 1.0]]]).expand(3, 1, 4)
    y = apply_rotary(x, *rotary_angles(torch.arange(3), 4, base=100.0))
    angle = torch.tensor([0.0, 1.0, 2.0])
    expected = torch.stack(
        [angle.cos(), angle.sin(), -(angle / 10).sin(), (angle / 10).cos()], dim=1
    )
    assert torch.allclose(y[:, 0], expected, atol=1e-6)


def test_a_score_depends_on_the_difference_of_positions():
    q, k = torch.randn(2, 1, 1, 16, dtype=torch.float64)

    def turned(x, position):
        return apply_rotary(x, *rotary_angles(torch.tensor([position]), 16)).flatten()

    def score(i, j):
        return turned(q, i) @ turned(k, j)

    assert torch.allclose(score(7, 3), score(104, 100), rtol=1e-5)
    assert not torch.allclose(score(7, 3), score(8, 3), rtol=1e-2)


def test_rote_without_gaps_is_rotary():
    position = torch.arange(5)
    for a, b in zip(
        rote_angles(position, torch.zeros(5), 8), rotary_angles(position, 8), strict=True
    ):
        assert torch.equal(a, b)


def test_rote_turns_by_the_logarithm_of_the_gap():
    gap = torch.tensor([0.0, 60.0, 60.0 * (torch.e**3 - 1)])
    cos, sin = rote_angles(torch.zeros(3), gap, 2, time_scale_s=60.0)
    assert torch.allclose(
        torch.atan2(sin, cos)[:, 0], torch.tensor([0.0, 0.6931472, 3.0]), atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rotation_keeps_dtype_and_length(dtype):
    x = torch.randn(6, 3, 8, dtype=dtype)
    y = apply_rotary(x, *rotary_angles(torch.arange(6), 8))
    assert y.dtype == dtype
    assert torch.allclose(y.float().norm(dim=-1), x.float().norm(dim=-1), rtol=2e-2)


def test_gradient_by_finite_differences():
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    cos, sin = rotary_angles(torch.arange(3), 4)
    assert torch.autograd.gradcheck(lambda x: apply_rotary(x, cos, sin), (x,))


def test_strided_heads_and_no_tokens():
    fused = torch.randn(5, 3, 2, 6)
    angles = rotary_angles(torch.arange(5), 6)
    strided = fused[:, 1]
    assert torch.equal(apply_rotary(strided, *angles), apply_rotary(strided.contiguous(), *angles))
    assert apply_rotary(fused[:0, 0], *rotary_angles(torch.arange(0), 6)).shape == (0, 2, 6)


def test_refuses():
    position, x = torch.arange(3), torch.randn(3, 2, 4)
    cos, sin = rotary_angles(position, 4)
    check_refuses(
        [
            (lambda: rotary_angles(position, 5), ShapeError, "head_dim must be even .* got 5"),
            (lambda: rotary_angles(position[None], 4), ShapeError, "position_T must have 1 dims"),
            (
                lambda: rote_angles(position, torch.zeros(2), 4),
                ShapeError,
                "gap_seconds_T has T=2 but position_T has T=3",
            ),
            (lambda: apply_rotary(x, cos[:2], sin), ShapeError, r"cos must have shape \(3, 4/2\)"),
            (lambda: apply_rotary(x, cos, sin[:, :1]), ShapeError, "sin must have shape"),
        ]
    )
