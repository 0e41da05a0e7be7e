import sys
from pathlib import Path

import pytest
import torch

from gem_opkit.errors import DtypeError
from gem_opkit.stochastic import philox_words, round_stochastically
from gem_opkit.testing import check_refuses

sys.path.insert(0, str(Path(__file__).parent))


def words(shape, *, seed=0):
    return torch.randint(0, 2**32, shape, generator=torch.Generator().manual_seed(seed))


def test_words_are_those_of_the_paper():
    # The known answers that the authors of Philox publish for 4x32 with ten and with seven rounds.
    zero, ones = torch.tensor([0]), torch.tensor([0xFFFFFFFF])
    for rounds, of_zero, of_ones in (
        (10, "6627e8d5 e169c58d bc57ac4c 9b00dbd8", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (7, "5f6fb709 0d893f64 4f121f81 4f730a48", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ):
        got = philox_words(0, zero, zero, zero, zero, rounds=rounds)
        assert " ".join(f"{int(word):08x}" for word in got) == of_zero
        got = philox_words(2**64 - 1, ones, ones, ones, ones, rounds=rounds)
        assert " ".join(f"{int(word):08x}" for word in got) == of_ones
    assert torch.equal(philox_words(0, zero, zero, zero, zero)[0], torch.tensor([0x5F6FB709]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_value_becomes_a_neighbour_and_itself_on_average(dtype):
    scale = 2.0 ** torch.arange(-30 if dtype == torch.float16 else -100, 15)
    x = (scale[:, None] * torch.tensor([1.0, -1.3, 1.71, -1.999])).flatten()
    draws = 4000
    many = x[:, None].expand(-1, draws).contiguous()
    rounded = round_stochastically(many, words(many.shape), dtype).double()
    distance = rounded.amax(1) - rounded.amin(1)
    assert max(row.unique().numel() for row in rounded) <= 2
    assert bool((rounded.amin(1) <= x.double()).all() and (rounded.amax(1) >= x.double()).all())
    # The mean of as many draws is off by at most five of its standard deviations.
    allowed = 5 * 0.5 * distance / draws**0.5
    assert bool(((rounded.mean(1) - x.double()).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_the_format_holds_stays(dtype):
    held = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0**-24, 60000.0]).to(dtype).float()
    for seed in range(5):
        got = round_stochastically(held, words(held.shape, seed=seed), dtype)
        assert torch.equal(got, held.to(dtype))
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan])
    got = round_stochastically(odd, torch.full((3,), 2**32 - 1), dtype)
    assert got.tolist()[:2] == [torch.inf, -torch.inf]
    assert bool(got[2].isnan())


def test_refuses():
    x = torch.ones(2)
    check_refuses(
        [
            (
                lambda: round_stochastically(x.half(), words((2,)), torch.float16),
                DtypeError,
                "x must be fp32",
            ),
            (
                lambda: round_stochastically(x, words((2,)), torch.float32),
                DtypeError,
                "dtype must be torch.float16 or torch.bfloat16",
            ),
        ]
    )


@pytest.mark.interpreter
def test_kernels_draw_and_round_with_the_same_bits():
    from stochastic_kernel import rounding_kernel

    x = torch.randn(4, 16) * 2.0 ** torch.randint(-28, 10, (4, 16))
    drawn, out = torch.zeros(4, 16, dtype=torch.int64), torch.zeros(4, 16, dtype=torch.float16)
    rounding_kernel[(1,)](x, drawn, out, ROWS=4, COLUMNS=16)
    row, group = torch.arange(4)[:, None], torch.arange(4)[None, :]
    expected = philox_words(7, row, row + 3, group, torch.full_like(row, 9))
    expected = torch.stack(expected, dim=-1).flatten(1)
    assert torch.equal(drawn, expected)
    assert torch.equal(out, round_stochastically(x, expected, torch.float16))
