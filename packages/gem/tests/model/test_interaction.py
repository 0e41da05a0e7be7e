"""The experts: what they compute, and that they are separate."""

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import functional_call

from gem.model import interaction, token_linear
from gem.model.expert_gradients import inputs_beside, pair_products_beside
from gem.model.interaction import (
    ExpertMixture,
    FactorisationBlock,
    Summary,
    TokenLinear,
)
from gem.model.spec import ExpertsSpec
from gem.model.structure import expert_parts
from gem_opkit.errors import ConfigError
from gem_opkit.testing import check_run_budget, fresh, run_with_gradients

WIDTH = 6


def mixture(tokens=7, summary_tokens=3, **changes):
    spec = ExpertsSpec(**{"fm_tokens": 2, "linear_tokens": 3, "rank": 4, **changes})
    return ExpertMixture(tokens, summary_tokens, width=WIDTH, spec=spec, activation="relu")


def test_token_linear_mixes_tokens_only():
    layer = TokenLinear(4, 2)
    x_BND = torch.randn(3, 4, WIDTH)
    want = torch.einsum("mn,bnd->bmd", layer.weight, x_BND)
    torch.testing.assert_close(layer(x_BND), want)


def test_summary_has_its_tokens():
    summary = Summary(7, 2, width=WIDTH, hidden=5, activation="gelu")
    assert summary(torch.randn(3, 7, WIDTH)).shape == (3, 2, WIDTH)
    assert summary(torch.randn(0, 7, WIDTH)).shape == (0, 2, WIDTH)


def test_factorisation_of_full_rank_sees_every_pair():
    tokens = 5
    spec = ExpertsSpec(fm_tokens=2, rank=tokens, mlp_widths=(8,))
    block = FactorisationBlock(tokens, WIDTH, spec, activation="relu", dropout=0.0)
    with torch.no_grad():
        block.make_y.y.copy_(torch.eye(tokens))
    x_BND = torch.randn(3, tokens, WIDTH)
    pairs = torch.stack([x @ x.t() for x in x_BND]).flatten(1)
    want = block.mlp(torch.nn.functional.layer_norm(pairs, (tokens * tokens,), eps=1e-6))
    torch.testing.assert_close(block(x_BND).flatten(1), want, rtol=1e-4, atol=1e-5)


def gradients_equal(own, plain, inputs, upstream):
    for got, expected in zip(
        torch.autograd.grad(own, inputs, upstream),
        torch.autograd.grad(plain, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)


def wide(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def test_products_by_way_of_all_pairs_are_the_same_with_their_gradients():
    x, shared, mix = wide(3, 5, 4), wide(5, 2), wide(3, 6, 5)
    upstream = [torch.randn(shape, dtype=torch.float64) for shape in ((3, 5, 2), (3, 6, 4))]
    y = shared.expand(3, -1, -1)

    def plain():
        return [torch.bmm(x, torch.bmm(x.transpose(1, 2), y)), torch.bmm(mix, x)]

    own, passed_on = pair_products_beside(x, y)
    torch.testing.assert_close(own, plain()[0])
    gradients_equal([own, torch.bmm(mix, passed_on)], plain(), (x, shared, mix), upstream)
    # Where the tokens are used for nothing else, or the products are not.
    y = shared.expand(3, -1, -1)
    gradients_equal(pair_products_beside(x, y)[0], plain()[0], (x, shared), upstream[0])
    passed_on = pair_products_beside(x, y)[1]
    gradients_equal(torch.bmm(mix, passed_on), plain()[1], (x, mix), upstream[1])


@pytest.mark.parametrize("partition", ["interleaved", "contiguous"])
@pytest.mark.parametrize("summaries", [0, 3])
def test_what_experts_read_has_the_gradients_of_slices_and_joins(partition, summaries):
    x, h = wide(2, 7, 4), wide(2, summaries, 4)
    parts = expert_parts(7, ExpertsSpec(count=3, partition=partition))
    plain = [torch.cat([x[:, part], h], dim=1) for part in parts] + [2 * x]
    own, beside = inputs_beside(x, h, parts)
    own.append(2 * beside)
    assert all(torch.equal(one, other) for one, other in zip(own, plain, strict=True))
    upstream = [torch.randn_like(each) for each in plain]
    gradients_equal(own, plain, (x, h), upstream)


@pytest.mark.parametrize("projection", ["learned", "attentive"])
@pytest.mark.parametrize("tokens", [13, 16, 26])
def test_tokens_of_zeros_change_nothing(tokens, projection, monkeypatch):
    """As for bf16 on a GPU, whose products over tokens read 16 bytes at once."""
    torch.manual_seed(0)
    spec = ExpertsSpec(fm_tokens=2, linear_tokens=3, rank=4, mlp_widths=(8,), projection=projection)
    layer = ExpertMixture(tokens, 3, width=64, spec=spec, activation="relu").double()
    x, h = wide(2, tokens, 64), wide(2, 3, 64)
    weights = list(layer.parameters())
    plain = layer(x, h)
    monkeypatch.setattr(token_linear, "reads_wide", lambda x: True)
    inner, torch_bmm = [], torch.bmm

    def bmm(a, b):
        inner.append(a.shape[2])
        return torch_bmm(a, b)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "bmm", bmm)
        own = layer(x, h)
    assert len(inner) >= 6
    assert all(size % 8 == 0 for size in inner)
    gradients_equal([own], [plain], (x, h, *weights), [torch.randn_like(plain)])


@pytest.mark.gpu
@pytest.mark.parametrize("partition", ["interleaved", "all"])
def test_a_mixture_on_a_gpu_is_within_the_error_budget(partition, monkeypatch):
    torch.manual_seed(0)
    spec = ExpertsSpec(fm_tokens=2, linear_tokens=3, rank=4, mlp_widths=(64,), partition=partition)
    layer = ExpertMixture(10, 4, width=64, spec=spec, activation="relu").cuda()
    names = [name for name, _ in layer.named_parameters()]
    given = [torch.randn(40, n, 64, device="cuda").bfloat16() for n in (10, 4)]
    given += [parameter.detach().bfloat16() for parameter in layer.parameters()]
    given = [tensor.requires_grad_() for tensor in given]

    def formula(x, h, *weights):
        return functional_call(layer, dict(zip(names, weights, strict=True)), (x, h))

    def on_cpu(*tensors):
        return formula(*(tensor.cpu() for tensor in tensors)).cuda()

    def plain(*tensors):
        with monkeypatch.context() as patched:
            patched.setattr(interaction, "in_halves", lambda *tensors: False)
            return formula(*tensors)

    exact = run_with_gradients(on_cpu, fresh(given, dtype=torch.float64))
    low = run_with_gradients(plain, fresh(given))
    check_run_budget(run_with_gradients(formula, fresh(given)), low, exact)


@pytest.mark.gpu
def test_pair_products_on_a_gpu_are_within_the_error_budget():
    draw = torch.Generator().manual_seed(0)
    given = [
        torch.randn(shape, generator=draw).bfloat16().cuda().requires_grad_()
        for shape in ((40, 80, 256), (40, 80, 48))
    ]

    def formula(x, y):
        return x @ (x.transpose(1, 2) @ y)

    def one_of_both(x, y):
        return interaction.pair_products(x, y)[0]

    exact = run_with_gradients(formula, fresh(given, dtype=torch.float64))
    low = run_with_gradients(formula, fresh(given))
    check_run_budget(run_with_gradients(one_of_both, fresh(given)), low, exact)


@given(
    tokens=st.integers(0, 20),
    count=st.integers(1, 6),
    partition=st.sampled_from(["interleaved", "contiguous"]),
)
def test_every_token_has_one_expert(tokens, count, partition):
    parts = expert_parts(tokens, ExpertsSpec(count=count, partition=partition))
    read = [list(range(tokens)[part]) for part in parts]
    assert sorted(chain.from_iterable(read)) == list(range(tokens))
    sizes = [len(part) for part in read]
    assert max(sizes) - min(sizes) <= 1


def test_partition_all_gives_every_expert_everything():
    spec = ExpertsSpec(count=3, partition="all")
    assert [list(range(5)[part]) for part in expert_parts(5, spec)] == [list(range(5))] * 3


@pytest.mark.parametrize("partition", ["interleaved", "contiguous", "all"])
@pytest.mark.parametrize("projection", ["learned", "attentive"])
def test_mixture_is_the_sum_of_its_experts(partition, projection):
    layer = mixture(partition=partition, projection=projection, count=3)
    x_BND, summary_BPD = torch.randn(4, 7, WIDTH), torch.randn(4, 3, WIDTH)
    total = torch.einsum("mn,bnd->bmd", layer.shortcut.weight, x_BND)
    for expert, part in zip(layer.experts, layer.parts, strict=True):
        total = total + expert(torch.cat([x_BND[:, part], summary_BPD], dim=1))
    want = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6)
    out = layer(x_BND, summary_BPD)
    assert out.shape == (4, layer.tokens, WIDTH)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


def test_the_sum_over_experts_can_be_computed_by_another():
    layer = mixture(count=3)
    x_BND, summary_BPD = torch.randn(4, 7, WIDTH), torch.randn(4, 3, WIDTH)
    names, out, own, seen = list(layer.state_dict()), layer(x_BND, summary_BPD), layer.run, []

    def by_another(experts, parts):
        seen.append(len(parts))
        return own(experts, parts)

    layer.run = by_another
    assert torch.equal(layer(x_BND, summary_BPD), out)
    assert seen == [3]
    assert list(layer.state_dict()) == names


def test_expert_reads_its_part_and_the_summary_only():
    layer = mixture(count=2, partition="contiguous")
    x_BND = torch.randn(4, 7, WIDTH, requires_grad=True)
    summary_BPD = torch.randn(4, 3, WIDTH, requires_grad=True)
    layer.experts[1](layer.inputs(x_BND, summary_BPD)[1]).square().sum().backward()
    touched = x_BND.grad.abs().sum((0, 2)) > 0
    assert touched.tolist() == [False] * 3 + [True] * 4
    assert torch.all(summary_BPD.grad.abs().sum((0, 2)) > 0)
    assert all(p.grad is None for p in layer.experts[0].parameters())


def test_shortcut_is_the_identity_where_counts_agree():
    layer = mixture(tokens=5)
    assert layer.tokens == 5
    assert isinstance(layer.shortcut, torch.nn.Identity)
    assert mixture(residual=False).shortcut is None


def test_mixture_without_summaries_and_without_examples():
    layer = mixture(summary_tokens=0)
    assert layer(torch.randn(2, 7, WIDTH), torch.randn(2, 0, WIDTH)).shape == (2, 5, WIDTH)
    assert layer(torch.randn(0, 7, WIDTH), torch.randn(0, 0, WIDTH)).shape == (0, 5, WIDTH)


def test_expert_without_tokens_is_refused():
    with pytest.raises(ConfigError, match="must be at most the 2 tokens of the layer; got 3"):
        mixture(tokens=2, summary_tokens=0, count=3)
