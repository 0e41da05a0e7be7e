"""Work on a second stream sees what it was given, and gives what one stream would."""

import pytest
import torch

from gem_parallel.side_stream import SideStream


def layer(x_BD, weight_DD, side):
    """A chain that the work does not need, then the work, whose input nobody else keeps."""
    read_BD = x_BD @ weight_DD
    beside = None if side is None else side.begin(read_BD * 2.0)
    other_BD = x_BD
    for _ in range(6):
        other_BD = torch.tanh(other_BD @ weight_DD)
    dropped = torch.nn.functional.dropout(other_BD, 0.5)

    def work(read_BD):
        for _ in range(6):
            read_BD = torch.tanh(read_BD @ weight_DD)
        return torch.nn.functional.dropout(read_BD, 0.5)

    found = work(read_BD * 2.0) if beside is None else beside(work)
    return dropped + found


def learned(device, width, side, rounds=4):
    torch.manual_seed(0)
    weight_DD = (torch.randn(width, width, device=device) / width**0.5).requires_grad_()
    found = []
    for _ in range(rounds):
        x_BD = torch.randn(width, width, device=device)
        out_BD = layer(layer(x_BD, weight_DD, side), weight_DD, side)
        out_BD.square().mean().backward()
        found += [out_BD.detach().clone(), weight_DD.grad.clone()]
    return found


def test_on_a_cpu_nothing_changes():
    device = torch.device("cpu")
    expected = learned(device, 8, None)
    found = learned(device, 8, SideStream(device))
    assert all(map(torch.equal, found, expected))


@pytest.mark.gpu
def test_on_a_gpu_it_gives_what_one_stream_gives():
    device = torch.device("cuda")
    side = SideStream(device)
    streams = set()
    beside = side.begin(torch.ones(2, device=device))
    beside(lambda x: streams.add(torch.cuda.current_stream().cuda_stream) or x)
    assert streams != {torch.cuda.current_stream().cuda_stream}
    # Each gradient is a sum over uses of the weight, which autograd may add up in another order.
    expected = learned(device, 1024, None, rounds=8)
    for _ in range(3):
        found = learned(device, 1024, side, rounds=8)
        assert all(map(torch.equal, found[::2], expected[::2]))
        torch.testing.assert_close(found[1::2], expected[1::2], rtol=1e-4, atol=1e-7)
