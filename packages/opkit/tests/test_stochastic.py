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
    # The known answers that the authors of Philox publish for 4x32 with ten rounds.
    zero, ones = torch.tensor([0]), torch.tensor([0xFFFFFFFF])
    got = philox_words(0, zero, zero, zero, zero)
    assert [int(word) for word in got] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    got = philox_words(2**64 - 1, ones, ones, ones, ones)
    assert [int(word) for word in got] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


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
