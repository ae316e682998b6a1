"""Causal alignment and windows: who sees whom, for every L and S."""

from __future__ import annotations

import math

import pytest
import torch

import flash_attn_ext
import reference
from compare import assert_same

forward = torch.ops.flash.attention_forward


def seen(rows: int, keys: int, device: str, **options) -> list[str]:
    """One string a row: 1 where the key has weight. Values are the identity, so that out is the matrix of weights."""
    query, key = torch.randn(1, 1, rows, 4, device=device), torch.randn(1, 1, keys, 4, device=device)
    value = torch.eye(keys, device=device)[None, None]
    out = forward(query, key, value, **options)[0]
    return ["".join("1" if weight > 0 else "0" for weight in row) for row in out[0, 0].tolist()]


def test_top_left_is_what_is_causal_means(device: str):
    """K1: the drawing of SDPA's documentation, wide and tall."""
    assert seen(2, 5, device, window_right=0) == ["10000", "11000"]
    assert seen(5, 2, device, window_right=0) == ["10", "11", "11", "11", "11"]


def test_bottom_right(device: str):
    """K3: the last row sees everything; leading rows may see nothing."""
    assert seen(2, 5, device, window_right=0, bottom_right=True) == ["11110", "11111"]
    assert seen(5, 2, device, window_right=0, bottom_right=True) == ["00", "00", "00", "10", "11"]


def test_window_ends_are_inclusive(device: str):
    """U4: left = 1 is the key before and the row's own; a window of W keys that ends at the row has left = W - 1."""
    assert seen(4, 4, device, window_left=1, window_right=0) == ["1000", "1100", "0110", "0011"]
    assert seen(4, 4, device, window_left=0, window_right=1) == ["1100", "0110", "0011", "0001"]
    assert seen(4, 4, device, window_left=0, window_right=0) == ["1000", "0100", "0010", "0001"]
    assert seen(2, 4, device, window_left=1, window_right=0, bottom_right=True) == ["0110", "0011"]
    assert seen(4, 2, device, window_left=1, window_right=0) == ["10", "11", "01", "00"]


def test_python_function_offers_the_same(device: str):
    query, key, value = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    query, key, value = query.to(device), key.to(device), value.to(device)
    for arguments, options in (
        ({"causal": True}, {"window_right": 0}),
        ({"causal": "top_left"}, {"window_right": 0}),
        ({"causal": "bottom_right"}, {"window_right": 0, "bottom_right": True}),
        ({"window": (1, 2)}, {"window_left": 1, "window_right": 2}),
        ({"window": (1, None)}, {"window_left": 1}),
        ({"causal": "bottom_right", "window": (2, None)}, {"window_left": 2, "window_right": 0, "bottom_right": True}),
        ({"causal": True, "window": (0, 5)}, {"window_left": 0, "window_right": 0}),
    ):
        out, lse = flash_attn_ext.attention(query, key, value, return_lse=True, **arguments)
        expected, expected_lse = forward(query, key, value, **options)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse), arguments


def test_one_row_and_a_cache(device: str):
    """K2: with L = 1, top-left sees only key 0 and bottom-right sees everything."""
    query, key, value = (torch.randn(2, 2, size, 8, device=device) for size in (1, 8, 8))
    out = torch.ops.flash.attention(query, key, value, is_causal=True)
    torch.testing.assert_close(out, value[:, :, :1])
    out = flash_attn_ext.attention(query, key, value, causal="bottom_right")
    assert_same(out, torch.ops.flash.attention(query, key, value))


@pytest.mark.parametrize("kind", ["top-left", "bottom-right"])
def test_gradients_of_keys_that_nobody_sees_are_zero(kind: str, device: str):
    rows, keys = (3, 200) if kind == "top-left" else (200, 3)
    leaves = [torch.randn(1, 2, size, 16, device=device, requires_grad=True) for size in (rows, keys, keys)]
    out, lse = forward(*leaves, window_right=0, bottom_right=kind == "bottom-right")
    out.backward(torch.randn_like(out))
    query, key, value = leaves
    if kind == "top-left":
        assert not key.grad[:, :, rows:].any() and not value.grad[:, :, rows:].any()
        assert key.grad[:, :, :rows].any()
    else:
        dead = rows - keys
        assert not out[:, :, :dead].any() and (lse[:, :, :dead] == -math.inf).all()
        assert not query.grad[:, :, :dead].any() and query.grad[:, :, dead + 1 :].any()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_mask_that_hides_nothing_changes_nothing(dtype: torch.dtype, device: str):
    """K6, huggingface/transformers#35032: cross attention with an all-true mask."""
    query = torch.randn(4, 1, 20, 32, device=device, dtype=dtype)
    key, value = (torch.randn(4, 1, 10, 32, device=device, dtype=dtype) for _ in range(2))
    expected = torch.ops.flash.attention(query, key, value)
    ones = torch.ones(4, 1, 20, 10, dtype=torch.bool, device=device)
    for mask in (ones, torch.zeros_like(ones, dtype=dtype)):
        masked = torch.ops.flash.attention(query, key, value, mask)
        torch.testing.assert_close(masked, expected, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("side", ["left", "right"])
def test_causal_and_padding_together(side: str, device: str):
    """K7: SDPA's operator refuses both; attention_forward and the Python function take the AND of the two."""
    query, key, value = (torch.randn(3, 2, 64, 16, device=device) for _ in range(3))
    lengths = torch.tensor([64, 40, 1], device=device)[:, None]
    position = torch.arange(64, device=device)
    padding = (position < lengths if side == "right" else position >= 64 - lengths)[:, None, None, :]
    both = padding & torch.ones(64, 64, dtype=torch.bool, device=device).tril()
    expected, expected_lse = reference.attention(query, key, value, mask=both)
    with pytest.raises(RuntimeError, match="Explicit attn_mask should not be set when is_causal=True"):
        torch.ops.flash.attention(query, key, value, padding, is_causal=True)
    for out, lse in (
        forward(query, key, value, padding, window_right=0),
        flash_attn_ext.attention(query, key, value, padding, causal=True, return_lse=True),
    ):
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, expected_lse)


def test_window_of_a_short_cache(device: str):
    """U6: rows past the last key plus the window see nothing: out 0, lse -inf."""
    query, key, value = torch.randn(1, 1, 129, 32), torch.randn(1, 1, 20, 32), torch.randn(1, 1, 20, 32)
    out, lse = forward(query.to(device), key.to(device), value.to(device), window_left=32, window_right=64)
    dead = torch.arange(129) - 32 > 19
    assert not out[0, 0, dead].any() and (lse[0, 0, dead] == -math.inf).all()
    assert lse[0, 0, ~dead].isfinite().all()


def test_window_equals_mask(device: str):
    """The interval and the mask that spells it out give the same numbers, with grouped heads (U7)."""
    query = torch.randn(1, 24, 150, 16, device=device)
    key, value = (torch.randn(1, 2, 150, 16, device=device) for _ in range(2))
    mask = reference.visible_interval(150, 150, 63, 0, False, device)[None, None]
    out, lse = forward(query, key, value, window_left=63, window_right=0)
    expected, expected_lse = forward(query, key, value, mask)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize(
    "arguments, error",
    [
        ({"causal": "bottom"}, ValueError),
        ({"causal": "upper_left"}, ValueError),
        ({"window": 5}, TypeError),
        ({"window": (1, 2, 3)}, TypeError),
        ({"window": (1.5, 2)}, TypeError),
        ({"window": (-1, 2)}, ValueError),
    ],
    ids=str,
)
def test_wrong_options_are_named(arguments: dict, error: type[Exception]):
    query = torch.randn(1, 1, 4, 8)
    with pytest.raises(error, match=next(iter(arguments))):
        flash_attn_ext.attention(query, query, query, **arguments)
