"""Tensors without elements, forward and backward, and never a division by their size."""

from __future__ import annotations

import math

import pytest
import torch

from compare import dtype_name, poisoned

forward = torch.ops.flash.attention_forward


def call(device: str, dtype: torch.dtype, query, key, value, **options):
    leaves = [torch.randn(size, device=device, dtype=dtype, requires_grad=True) for size in (query, key, value)]
    with poisoned(device):
        out, lse = forward(*leaves, **options)
        out.backward(torch.randn_like(out))
    return leaves, out, lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=dtype_name)
@pytest.mark.parametrize(
    "query, key, value",
    [
        ((0, 10, 395, 64), (0, 10, 16, 64), (0, 10, 16, 64)),
        ((2, 0, 5, 8), (2, 0, 7, 8), (2, 0, 7, 8)),
        ((2, 3, 0, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
        ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 0)),
        ((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)),
    ],
    ids=["batch", "heads", "rows", "value_dim", "everything"],
)
def test_nothing_to_compute(query, key, value, dtype: torch.dtype, device: str):
    """E1, E4: an empty result of the right shape, and gradients of zero where there are any."""
    for options in ({}, {"window_right": 0}, {"window_left": 2, "bottom_right": True}):
        leaves, out, lse = call(device, dtype, query, key, value, **options)
        assert out.shape == (*query[:3], value[3]) and out.numel() == 0
        assert lse.shape == query[:3]
        for leaf in leaves:
            assert leaf.grad.shape == leaf.shape and not leaf.grad.any()


@pytest.mark.parametrize("right", [None, 0])
@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize("rows", [1, 128])
def test_no_keys(rows: int, bottom_right: bool, right, device: str):
    """E2: every row sees nothing: out 0, lse -inf, gradient 0."""
    for dtype in (torch.float32, torch.bfloat16):
        leaves, out, lse = call(
            device, dtype, (2, 3, rows, 16), (2, 3, 0, 16), (2, 3, 0, 16), window_right=right, bottom_right=bottom_right
        )
        assert out.shape == (2, 3, rows, 16) and not out.any()
        assert (lse == -math.inf).all()
        assert not leaves[0].grad.any()
        assert leaves[1].grad.shape == (2, 3, 0, 16)


def test_no_keys_but_a_sink(device: str):
    """The sink alone is in the sum: out 0, lse = sink, and the gradient of lse reaches it."""
    query = torch.randn(2, 3, 5, 16, device=device)
    key = torch.randn(2, 3, 0, 16, device=device)
    sinks = torch.randn(3, device=device, requires_grad=True)
    out, lse = forward(query, key, key, sinks=sinks)
    assert not out.any()
    torch.testing.assert_close(lse, sinks[None, :, None].expand(2, 3, 5))
    lse.sum().backward()
    torch.testing.assert_close(sinks.grad, torch.full((3,), 10.0, device=device))


@pytest.mark.parametrize("mask", ["bool", "float"])
@pytest.mark.parametrize("shape", [(1, 1, 5, 0), (2, 3, 1, 0), (1, 1, 1, 1), (1, 1, 5, 1), (2, 3, 5, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=dtype_name)
def test_masks_without_keys(shape: tuple[int, ...], mask: str, dtype: torch.dtype, device: str):
    """Some have elements all the same: they are broadcast over no keys, and their gradient is zero."""
    query = torch.randn(2, 3, 5, 8, device=device, dtype=dtype, requires_grad=True)
    key = torch.randn(2, 3, 0, 8, device=device, dtype=dtype)
    attn_mask = torch.zeros(shape, device=device, dtype=dtype)
    attn_mask = attn_mask.bool() if mask == "bool" else attn_mask.requires_grad_()
    with poisoned(device):
        out, _ = forward(query, key, key, attn_mask)
        out.sum().backward()
    assert not out.any() and not query.grad.any()
    if mask == "float":
        assert attn_mask.grad.shape == shape and not attn_mask.grad.any()


def test_head_dim_zero(device: str):
    """Every score is 0: with a scale that is the mean of the values; without one, 1/sqrt(0) has no meaning."""
    query, key = torch.randn(2, 3, 5, 0, device=device), torch.randn(2, 3, 7, 0, device=device)
    value = torch.randn(2, 3, 7, 8, device=device, requires_grad=True)
    out, lse = forward(query, key, value, scale=1.0)
    torch.testing.assert_close(out, value.mean(2, keepdim=True).expand_as(out))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(7)))
    out.sum().backward()
    torch.testing.assert_close(value.grad, torch.full_like(value, 5 / 7))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (0, 3, 5, 8), (2, 0, 3, 5, 8)], ids=str)
def test_every_rank(shape, device: str):
    query = torch.randn(shape, device=device, requires_grad=True)
    out = torch.ops.flash.attention(query, query, query)
    out.sum().backward()
    assert out.shape == shape and query.grad.shape == shape


def test_second_derivative_of_nothing(device: str):
    query = torch.randn(1, 2, 3, 8, device=device, requires_grad=True)
    key = torch.randn(1, 2, 0, 8, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(torch.ops.flash.attention(query, key, key).sum(), query, create_graph=True)
    gradient.sum().backward()
    assert query.grad is None or not query.grad.any()
