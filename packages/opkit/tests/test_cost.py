"""Costs add, scale and bound time; formulas reach torch's FLOP counter."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from gem_opkit.cost import Cost, op_packet, register_flops
from gem_opkit.errors import ConfigError
from gem_opkit.testing import check_refuses


def test_costs_add_and_sum():
    assert Cost(1, 2) + Cost(10, 20) == Cost(11, 22)
    assert sum([Cost(1, 2), Cost(3, 4), Cost(5, 6)]) == Cost(9, 12)
    assert sum([], start=Cost(0, 0)) == Cost(0, 0)


def test_costs_scale_to_whole_numbers():
    assert 3 * Cost(2, 5) == Cost(2, 5) * 3 == Cost(6, 15)
    assert 2.5 * Cost(2, 3) == Cost(5, 8)
    assert isinstance((2.5 * Cost(2, 3)).flops, int)


def test_costs_do_not_add_to_other_things():
    with pytest.raises(TypeError):
        Cost(1, 1) + 5
    with pytest.raises(TypeError):
        Cost(1, 1) * "2"


def test_roofline_is_the_slower_of_compute_and_memory():
    assert Cost(2 * 10**12, 0).roofline_ms(1e15, 4e12) == pytest.approx(2.0)
    assert Cost(0, 8 * 10**9).roofline_ms(1e15, 4e12) == pytest.approx(2.0)
    assert Cost(2 * 10**12, 16 * 10**9).roofline_ms(1e15, 4e12) == pytest.approx(4.0)


def test_refusals():
    check_refuses(
        [
            (lambda: Cost(-1, 0), ConfigError, "flops must be at least 0; got -1"),
            (lambda: Cost(0, -1), ConfigError, "bytes must be at least 0"),
            (lambda: Cost(1, 1).roofline_ms(0, 1), ConfigError, "peak_flops_per_s must be above"),
            (
                lambda: Cost(1, 1).roofline_ms(1, float("nan")),
                ConfigError,
                "bytes_per_s must be above 0; got nan",
            ),
            (lambda: register_flops("nocolons", lambda: 0), ConfigError, "'nocolons'"),
        ]
    )


@torch.library.custom_op("gem_cost_test::scaled", mutates_args=())
def scaled(x_T: Tensor, repeats: int) -> Tensor:
    return x_T * repeats


def test_every_form_of_an_op_names_the_same_packet():
    packet = torch.ops.gem_cost_test.scaled
    forms = ("gem_cost_test::scaled", "gem_cost_test::scaled.default", scaled, packet)
    for form in (*forms, packet.default):
        assert op_packet(form) is packet


def test_formula_gets_raw_arguments_and_is_counted():
    register_flops("gem_cost_test::scaled", lambda x_T, repeats: Cost(x_T.shape[0] * repeats, 9))
    with FlopCounterMode(display=False) as counter:
        scaled(torch.ones(5), 7)
        scaled(torch.ones(0), 7)
    assert counter.get_total_flops() == 35
    with pytest.raises(RuntimeError, match="duplicate"):
        register_flops(scaled, lambda x_T, repeats: 0)
