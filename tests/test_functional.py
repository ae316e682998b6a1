"""flash_attn_ext.attention and its siblings: ranks, broadcasting, options, errors, what reaches which operator."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as sdpa

import flash_attn_ext
from flash_attn_ext import attention, attention_varlen, explain, merge

SHAPES = [  # of query and key; value is as key
    ((5, 8), (7, 8)),
    ((3, 5, 8), (3, 7, 8)),
    ((2, 3, 5, 8), (2, 3, 7, 8)),
    ((4, 2, 3, 5, 8), (4, 2, 3, 7, 8)),
    ((3, 5, 8), (2, 3, 7, 8)),
    ((2, 1, 3, 5, 8), (4, 3, 7, 8)),
    ((2, 4, 5, 8), (2, 1, 7, 8)),
    ((2, 1, 5, 8), (2, 4, 7, 8)),
    ((1, 3, 5, 8), (2, 3, 7, 8)),
    ((0, 2, 5, 8), (0, 2, 7, 8)),
]


def normal(*shape: int, **options: object) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, **options)


def qkv(heads: int = 4, kv_heads: int = 4) -> tuple[torch.Tensor, ...]:
    return normal(2, heads, 5, 8), normal(2, kv_heads, 7, 8), normal(2, kv_heads, 7, 8)


@pytest.mark.parametrize(("query_shape", "key_shape"), SHAPES)
@pytest.mark.parametrize("return_lse", [False, True], ids=["plain", "lse"])
def test_every_rank_as_sdpa(query_shape, key_shape, return_lse):
    """Both roads: flash::attention folds in C++, attention_forward is folded for in Python. With every gradient."""
    tensors = [normal(*shape, requires_grad=True) for shape in (query_shape, key_shape, key_shape)]

    def ours(mask):
        found = attention(*tensors, mask, return_lse=return_lse)
        if return_lse:
            assert found[1].shape == found[0].shape[:-1]
        return found[0] if return_lse else found

    plain = sdpa(*tensors)
    for mask in (None, normal(5, 7, requires_grad=True), normal(*plain.shape[:-1], 7, requires_grad=True)):
        out, expected = ours(mask), sdpa(*tensors, mask)
        torch.testing.assert_close(out, expected)
        leaves = tensors if mask is None else [*tensors, mask]
        gradient = torch.randn_like(out)
        # Newer torch gives an empty mask no gradient at all: as good as zero.
        wanted = torch.autograd.grad(expected, leaves, gradient, materialize_grads=True)
        torch.testing.assert_close(torch.autograd.grad(out, leaves, gradient), wanted)


def test_grouped_heads_are_the_default():
    tensors = qkv(kv_heads=2)
    expected = sdpa(*tensors, enable_gqa=True)
    torch.testing.assert_close(attention(*tensors), expected)
    torch.testing.assert_close(attention(*tensors, return_lse=True)[0], expected)
    for options in ({}, {"return_lse": True}):
        with pytest.raises(RuntimeError, match="enable_gqa=True"):
            attention(*tensors, enable_gqa=False, **options)


def test_causal_bias_is_understood():
    query, key, value = qkv()
    lower, upper = causal_lower_right(5, 7), causal_upper_left(5, 7)
    torch.testing.assert_close(attention(query, key, value, lower), sdpa(query, key, value, lower))
    torch.testing.assert_close(attention(query, key, value, upper), sdpa(query, key, value, is_causal=True))
    torch.testing.assert_close(attention(query, key, value, lower), attention(query, key, value, causal="bottom_right"))
    assert explain(query, key, value, lower) == explain(query, key, value, causal="bottom_right")
    with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
        attention(query, key, value, lower, causal=True)
    with pytest.raises(ValueError, match=r"\(5, 6\).*\(5, 7\)"):
        attention(query, key, value, causal_lower_right(5, 6))


def test_mask_and_causal_both_apply():
    query, key, value = qkv()
    mask = normal(5, 7)
    both = mask.masked_fill(torch.ones(5, 7, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(attention(query, key, value, mask, causal=True), sdpa(query, key, value, both))


@pytest.mark.parametrize(
    ("window", "causal", "visible"),
    [
        ((1, 1), False, [[1, 1, 0, 0], [1, 1, 1, 0]]),
        ((None, 1), False, [[1, 1, 0, 0], [1, 1, 1, 0]]),
        ((0, None), False, [[1, 1, 1, 1], [0, 1, 1, 1]]),
        ((1, 3), True, [[1, 0, 0, 0], [1, 1, 0, 0]]),
        ((1, None), "bottom_right", [[0, 1, 1, 0], [0, 0, 1, 1]]),
        ([0, 0], "top_left", [[1, 0, 0, 0], [0, 1, 0, 0]]),
    ],
)
def test_window_ends(window, causal, visible):
    query, key, value = normal(1, 1, 2, 8), normal(1, 1, 4, 8), normal(1, 1, 4, 8)
    mask = torch.tensor(visible, dtype=torch.bool)
    torch.testing.assert_close(attention(query, key, value, window=window, causal=causal), sdpa(query, key, value, mask))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"causal": "left"}, ValueError, "causal must be"),
        ({"causal": None}, ValueError, "causal must be"),
        ({"window": 3}, TypeError, "window must be None or a pair"),
        ({"window": (1, 2, 3)}, TypeError, "window must be None or a pair"),
        ({"window": (1.0, 0)}, TypeError, "integers or None"),
        ({"window": (-1, 0)}, ValueError, "None for an open end"),
        ({"attn_mask": torch.zeros(3, 7), "return_lse": True}, RuntimeError, r"attn_mask of shape \[3, 7\] does not broadcast"),
        ({"alibi_slopes": torch.zeros(5, 4)}, RuntimeError, r"alibi_slopes of shape \[5, 4\] does not broadcast"),
        ({"key": torch.zeros(3, 1, 7, 8), "return_lse": True}, RuntimeError, "batch dimensions must be equal or 1"),
        ({"dropout_p": 1.5}, RuntimeError, "dropout probability has to be between 0 and 1"),
        ({"dropout_p": 1.5, "softcap": 1.0}, RuntimeError, "dropout probability has to be between 0 and 1"),
        ({"softcap": -1.0}, RuntimeError, "softcap"),
    ],
)
def test_errors_name_the_argument(options, error, text):
    query, key, value = qkv()
    with pytest.raises(error, match=text) as caught:
        attention(**({"query": query, "key": key, "value": value} | options))
    assert "\n" not in str(caught.value).strip()


def test_one_dimension_is_too_few():
    for function in (attention, explain):
        for options in ({}, {"return_lse": True}, {"attn_mask": torch.zeros(7)}):
            with pytest.raises(RuntimeError, match="to all be  at least 2 dimensional"):
                function(normal(8), normal(7, 8), normal(7, 8), **options)


@pytest.mark.parametrize("options", [{}, {"return_lse": True}], ids=["plain", "lse"])
def test_autocast_casts_as_for_sdpa(options):
    tensors = [tensor.float() for tensor in qkv()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(*tensors, torch.zeros(5, 7), **options)
        assert (out[0] if options else out).dtype == torch.bfloat16
        assert attention(*(tensor.double() for tensor in tensors)).dtype == torch.float64


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=["plain", "softcap"])
def test_dropout_follows_the_generator(options):
    tensors = qkv()

    def draw(seed):
        torch.manual_seed(seed)
        return attention(*tensors, dropout_p=0.5, **options)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert torch.equal(attention(*tensors, dropout_p=1.0, **options), torch.zeros_like(tensors[0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_slopes_and_sinks_of_any_dtype(dtype):
    """Parameters of a half-precision model are cast, and get their gradient in their own dtype."""
    tensors = [tensor.float() for tensor in qkv()]
    slopes, sinks = torch.rand(4, dtype=dtype), torch.randn(4, dtype=dtype, requires_grad=True)
    attention(*tensors, alibi_slopes=slopes, sinks=sinks).sum().backward()
    assert sinks.grad.dtype == dtype
    assert sinks.grad.abs().sum() > 0


def test_slopes_per_batch_of_any_rank():
    query, key, value = normal(3, 2, 4, 5, 8), normal(3, 2, 4, 7, 8), normal(3, 2, 4, 7, 8)
    slopes = torch.rand(3, 2, 4, dtype=torch.float64)
    distance = (torch.arange(5)[:, None] - torch.arange(7)).abs()
    expected = sdpa(query, key, value, -slopes[..., None, None] * distance)
    torch.testing.assert_close(attention(query, key, value, alibi_slopes=slopes), expected)


def test_varlen_is_attention_of_each_sequence():
    rows, keys = [3, 0, 4], [5, 2, 4]
    query, key, value = normal(7, 4, 8), normal(11, 2, 8), normal(11, 2, 8)
    offsets = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (rows, keys)]
    for causal, dense in ((False, False), (True, "bottom_right"), ("top_left", "top_left")):
        out, lse = attention_varlen(query, key, value, *offsets, 4, 5, causal=causal, return_lse=True)
        parts = zip(query.split(rows), key.split(keys), value.split(keys), strict=True)
        expected = [attention(*(t.transpose(0, 1) for t in part), causal=dense, return_lse=True) for part in parts]
        torch.testing.assert_close(out, torch.cat([part[0].transpose(0, 1) for part in expected]))
        torch.testing.assert_close(lse, torch.cat([part[1] for part in expected], -1))


def jagged(lengths, heads, dim):
    parts = [torch.randn(length, heads, dim) for length in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


@pytest.mark.parametrize("causal", [False, True, "bottom_right"])
def test_jagged_nested_tensors(causal):
    leaves = jagged([3, 5], 4, 8), jagged([4, 6], 2, 8), jagged([4, 6], 2, 8)
    tensors = [leaf.transpose(1, 2) for leaf in leaves]
    out = attention(*tensors, causal=causal)
    assert out.shape == tensors[0].shape
    dense = [[part.detach().requires_grad_() for part in leaf.unbind()] for leaf in leaves]
    expected = [attention(*(part.transpose(0, 1) for part in parts), causal=causal) for parts in zip(*dense, strict=True)]
    for ours, theirs in zip(out.unbind(), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    gradients = torch.autograd.grad(out.values().square().sum(), leaves)
    sum(part.square().sum() for part in expected).backward()
    for gradient, parts in zip(gradients, dense, strict=True):
        torch.testing.assert_close(gradient.values(), torch.cat([part.grad for part in parts]))


def test_nested_tensors_that_are_refused():
    tensor = jagged([3, 5], 4, 8)
    nested = tensor.transpose(1, 2)
    for arguments, options, text in (
        ((nested, nested, torch.randn(2, 4, 5, 8)), {}, "all be nested"),
        ((tensor, tensor, tensor), {}, "ragged, D"),
        ((nested, nested, nested), {"return_lse": True}, "return_lse"),
        ((nested, nested, nested, torch.zeros(5, 5)), {}, "attn_mask"),
    ):
        with pytest.raises(RuntimeError, match=text):
            attention(*arguments, **options)


def test_merge_of_halves_is_the_whole():
    query, key, value = qkv()
    halves = [attention(query, k, v, return_lse=True) for k, v in zip(key.split(4, 2), value.split(4, 2), strict=True)]
    torch.testing.assert_close(merge(*halves[0], *halves[1]), attention(query, key, value, return_lse=True))


def test_explain_takes_what_attention_takes():
    arguments = [list(inspect.signature(function).parameters) for function in (attention, explain)]
    assert set(arguments[0]) - {"scale", "return_lse"} == set(arguments[1]) - {"ignored"}
    assert isinstance(explain(*qkv(), scale=2.0, return_lse=True, window=(3, None)), str)
    with pytest.raises(TypeError, match="is_causal"):
        explain(*qkv(), is_causal=True)


def test_compiles_without_a_break():
    tensors = qkv(kv_heads=2)

    def both(query, key, value):
        out, lse = attention(query, key, value, causal="bottom_right", window=(3, None), return_lse=True)
        return out + lse[..., None] + attention(query, key, value, causal=True)

    torch.testing.assert_close(torch.compile(both, fullgraph=True, backend="aot_eager")(*tensors), both(*tensors))


def test_compiles_for_sizes_of_which_some_are_fixed():
    """What the function makes itself has plain sizes, which must meet the symbolic ones of its arguments."""
    tensors = qkv()

    def options(query, key, value):
        mask, slopes = torch.ones(5, 7, dtype=torch.bool).tril(), torch.ones(2, 4)
        return attention(query, key, value, mask, window=(3, 1), alibi_slopes=slopes)

    compiled = torch.compile(options, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), options(*tensors))


def test_public_names():
    sections = dict.fromkeys(("attention", "attention_decode", "attention_varlen", "merge"), ("Raises:", "Source:"))
    sections |= {"explain": ("Raises:", "Arguments"), "activate": ("Args:", "Raises:")}
    sections |= dict.fromkeys(("deactivate", "sdpa"), ("activate()",))
    assert sorted(flash_attn_ext.__all__) == sorted(sections)
    for name, needed in sections.items():
        assert all(section in getattr(flash_attn_ext, name).__doc__ for section in needed), name
