import inspect

import pytest
import torch

from gem_attention.meta_compat import generalized_dot_product_attention
from gem_jagged.batch import Layout
from gem_opkit.errors import DtypeError, ShapeError, UnsupportedError
from gem_opkit.testing import check_equal_up_to_rounding, check_refuses

# What the published call says of its arguments, in its own order and apart from the package.
TABLE = {
    "raw": lambda x: x,
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    "gelu_approx": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "fast_gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "leaky_relu": lambda x: torch.where(x >= 0, x, 0.01 * x),
    "relu": lambda x: x.clamp(min=0),
    "fast_gelu_bf16": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": lambda x: x * torch.sigmoid(x),
    "fast_silu": lambda x: x * torch.sigmoid(x),
    "hardswish": torch.nn.functional.hardswish,
    "relu_square": lambda x: x.clamp(min=0) ** 2,
    "fast_gelu_taylor_approx": lambda x: (
        0.5 * x + 0.3989422804 * x**2 - 0.0664903801 * x**4 + 0.0099735570 * x**6
    ),
}
NAMES = list(TABLE)


def offsets(lengths, *, dtype=torch.int32, device="cpu"):
    return Layout.from_lengths(list(lengths), dtype=dtype, device=device).offsets_O


def oracle(query, key, value, q_lengths, k_lengths, names, *, qk_scale=1.0, window_size=None):
    """fp64, a sequence and head at a time, in the words of the published call."""
    group = query.shape[1] // key.shape[1]
    outs = [query.new_zeros(0, query.shape[1], value.shape[2])]
    for q, k, v in zip(
        query.split(q_lengths), key.split(k_lengths), value.split(k_lengths), strict=True
    ):
        i, j = torch.arange(len(q))[:, None], torch.arange(len(k))[None, :]
        by_head = []
        for h, name in enumerate(names):
            p = TABLE[name](q[:, h] @ k[:, h // group].T)
            if window_size is not None:
                p = p * ((i - j).abs() <= window_size)
            by_head.append(qk_scale * p @ v[:, h // group])
        outs.append(torch.stack(by_head, 1))
    return torch.cat(outs)


def drawn(q_tokens, k_tokens, *, heads=4, kv_heads=2, width=16):
    query = torch.randn(q_tokens, heads, width) / width**0.5
    key, value = (torch.randn(k_tokens, kv_heads, width) for _ in range(2))
    return [x.requires_grad_() for x in (query, key, value)]


def check(leaves, run, exact, *, rows=slice(None)):
    out = run(*leaves)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected = exact(*wide)
    check_equal_up_to_rounding(out[rows].detach(), expected.detach().float())
    upstream = torch.zeros_like(out)
    upstream[rows] = torch.randn_like(out[rows])
    got = torch.autograd.grad(out, leaves, upstream)
    wanted = torch.autograd.grad(expected, wide, upstream[rows].double())
    for a, b in zip(got, wanted, strict=True):
        check_equal_up_to_rounding(a, b.float())


def test_signature_has_the_published_names():
    names = list(inspect.signature(generalized_dot_product_attention).parameters)
    assert names[:7] == [
        *("query", "key", "value", "query_offset", "key_offset"),
        *("max_seq_len_q", "max_seq_len_kv"),
    ]
    assert set(names[7:]) == {
        *("qk_scale", "output_offset", "window_size", "broadcast_q", "activation"),
        *("ensemble_activation_list", "unbuilt"),
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_name_and_the_scale_after_it(name):
    q_lengths, k_lengths = [5, 0, 7], [4, 3, 9]
    query, key, value = drawn(12, 16)
    check(
        [query, key, value],
        lambda q, k, v: generalized_dot_product_attention(
            q, k, v, offsets(q_lengths), offsets(k_lengths), 7, 9, qk_scale=0.25, activation=name
        ),
        lambda q, k, v: oracle(q, k, v, q_lengths, k_lengths, [name] * 4, qk_scale=0.25),
    )


def test_the_default_is_raw_and_unscaled():
    cu = offsets([5, 7])
    query, key, value = drawn(12, 12)
    check(
        [query, key, value],
        lambda q, k, v: generalized_dot_product_attention(q, k, v, cu, cu, 7, 7),
        lambda q, k, v: oracle(q, k, v, [5, 7], [5, 7], ["raw"] * 4),
    )


@pytest.mark.parametrize("window_size", [0, 3])
def test_the_window_counts_from_the_beginning(window_size):
    lengths = [9, 1, 0, 14]
    cu = offsets(lengths, dtype=torch.int64)
    query, key, value = drawn(24, 24)
    check(
        [query, key, value],
        lambda q, k, v: generalized_dot_product_attention(
            q, k, v, cu, cu, 14, 14, activation="silu", window_size=window_size
        ),
        lambda q, k, v: oracle(q, k, v, lengths, lengths, ["silu"] * 4, window_size=window_size),
    )


def test_the_list_names_the_first_heads():
    cu = offsets([5, 7])
    query, key, value = drawn(12, 12)
    for numbers in ([5, 7], [9, 10, 0, 3], [1]):
        names = [NAMES[n] for n in numbers] + ["silu"] * (4 - len(numbers))
        check(
            [query, key, value],
            lambda q, k, v, numbers=numbers: generalized_dot_product_attention(
                *(q, k, v, cu, cu, 7, 7), activation="silu", ensemble_activation_list=numbers
            ),
            lambda q, k, v, names=names: oracle(q, k, v, [5, 7], [5, 7], names),
        )


def test_output_offset_moves_the_sequences():
    # Sequences of 5, 0 and 4 rows in the order 2, 1, 0, and two rows that belong to none.
    q_lengths, k_lengths = [5, 0, 4], [4, 3, 6]
    query, key, value = drawn(11, 13)
    cu_q, cu_k = offsets(q_lengths), offsets(k_lengths)
    given = torch.tensor([4, 4, 0, 9], dtype=torch.int32)

    def exact(q, k, v):
        out = oracle(q[:9], k, v, q_lengths, k_lengths, ["silu"] * 4)
        return torch.cat([out[5:], out[:5]])

    check(
        [query, key, value],
        lambda q, k, v: generalized_dot_product_attention(
            q, k, v, cu_q, cu_k, 5, 6, activation="silu", output_offset=given
        ),
        exact,
        rows=slice(0, 9),
    )


def test_broadcast_q_is_pooling():
    k_lengths = [4, 0, 9]
    query, key, value = drawn(3, 13)
    cu_q, cu_k = offsets([3]), offsets(k_lengths)
    for given in (None, offsets([3, 3, 3])):
        check(
            [query, key, value],
            lambda q, k, v, given=given: generalized_dot_product_attention(
                *(q, k, v, cu_q, cu_k, 3, 9),
                qk_scale=0.5,
                activation="gelu",
                broadcast_q=True,
                output_offset=given,
            ),
            lambda q, k, v: oracle(
                q.repeat(3, 1, 1), k, v, [3] * 3, k_lengths, ["gelu"] * 4, qk_scale=0.5
            ),
        )


def test_refuses():
    query, key, value = (x.detach() for x in drawn(12, 12))
    cu = offsets([5, 7])

    def call(*args, **options):
        given = args or (query, key, value, cu, cu, 7, 7)
        return lambda: generalized_dot_product_attention(*given, **options)

    others = ("attn_mask", "is_causal", "seq_index", "enable_tma", "use_start_end_offsets")
    check_refuses(
        [
            *(
                (call(**{name: None}), UnsupportedError, f"{name} must be left out")
                for name in others
            ),
            (call(activation="softmax"), UnsupportedError, "activation must be one of raw, .*"),
            (
                call(ensemble_activation_list=[12]),
                UnsupportedError,
                "ensemble_activation_list must hold numbers from 0 to 11; got 12",
            ),
            (
                call(query, key, value, cu, cu.clone(), 7, 7, window_size=3),
                UnsupportedError,
                "window_size must come with one tensor",
            ),
            (
                call(query, key, value, offsets([12]), cu, 12, 7, broadcast_q=True, window_size=1),
                UnsupportedError,
                "window_size must be None with broadcast_q",
            ),
            (call(query, None, None, cu, cu, 7, 7), DtypeError, "key must be a tensor"),
            (call(output_offset=cu[:2]), ShapeError, "output_offset must have 3 offsets"),
        ]
    )
