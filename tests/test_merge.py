"""merge: partial results over disjoint keys, and gradients of the whole from foreign out and lse (ring attention)."""

from __future__ import annotations

import math

import pytest
import torch

import flash_attn_ext
import reference
from cases import Case, make_inputs
from compare import DTYPES, FORWARD, accumulate_type, assert_within, dtype_name, poisoned, run_flash

forward = torch.ops.flash.attention_forward
merge = torch.ops.flash.merge


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("split", [1, 17, 64, 99])
def test_parts_give_the_whole(split: int, dtype: torch.dtype, device: str):
    query, key, value = (torch.randn(2, 3, size, 40, dtype=torch.float64).to(dtype).to(device) for size in (37, 100, 100))
    first = forward(query, key[:, :, :split], value[:, :, :split])
    second = forward(query, key[:, :, split:], value[:, :, split:])
    with poisoned(device):
        out, lse = merge(*first, *second)
    assert out.dtype == dtype and lse.dtype == accumulate_type(dtype)
    truth, true_lse = reference.attention(query.double(), key.double(), value.double())
    plain, _ = reference.attention(query, key, value)
    _, plain_lse = reference.attention(*(x.to(accumulate_type(dtype)) for x in (query, key, value)))
    # Two parts are rounded to dtype before they are merged: one more rounding than a single call has.
    rounding = torch.finfo(dtype).eps * truth.abs().max() if dtype.itemsize == 2 else 0.0
    assert_within("out", out, truth, plain + (plain - truth).sign() * rounding, FORWARD, dtype)
    assert_within("lse", lse, true_lse, plain_lse, FORWARD, torch.float32 if dtype != torch.float64 else dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_empty_parts(dtype: torch.dtype, device: str):
    """N16: an empty part leaves the other exactly as it is; two empty parts stay empty."""
    out = torch.randn(2, 3, 5, 8, device=device).to(dtype)
    lse = torch.randn(2, 3, 5, device=device).to(accumulate_type(dtype))
    nothing, never = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    with poisoned(device):
        for merged in (merge(out, lse, nothing, never), merge(nothing, never, out, lse)):
            assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)
        both = merge(nothing, never, nothing, never)
    assert not both[0].any() and (both[1] == -math.inf).all()


def test_garbage_of_an_empty_part_is_not_used(device: str):
    out, lse = torch.randn(1, 1, 4, 8, device=device), torch.randn(1, 1, 4, device=device)
    garbage = torch.full_like(out, math.nan)
    merged, merged_lse = merge(out, lse, garbage, torch.full_like(lse, -math.inf))
    assert torch.equal(merged, out) and torch.equal(merged_lse, lse)


def test_nan_of_a_part_that_hardly_weighs_stays(device: str):
    """As 0 * NaN of plain attention: only a part that saw nothing is dropped."""
    nan, one = torch.full((2, 8), math.nan, device=device), torch.ones(2, 8, device=device)
    low, high = torch.zeros(2, device=device), torch.full((2,), 200.0, device=device)
    for pair in ((nan, low, one, high), (one, high, nan, low)):
        out, lse = merge(*pair)
        assert out.isnan().all() and torch.equal(lse, high)

    key = torch.zeros(1, 1, 4096, 64, device=device)  # so many that the CUDA kernels split them for so few rows
    key[:, :, -1] = 1e3
    value = torch.randn_like(key)
    value[:, :, 0, 5] = math.nan
    out, _ = forward(torch.ones(1, 1, 64, 64, device=device), key, value)
    assert out[..., 5].isnan().all() and out[..., :5].isfinite().all() and out[..., 6:].isfinite().all()


def test_order_and_extremes(device: str):
    """Commutative to the bit, and no overflow where the parts differ by hundreds."""
    out_a, out_b = torch.randn(2, 1, 2, 50, 16, device=device)
    lse_a = torch.randn(1, 2, 50, device=device) * 300
    lse_b = torch.randn(1, 2, 50, device=device) * 300
    ours, lse = merge(out_a, lse_a, out_b, lse_b)
    swapped, swapped_lse = merge(out_b, lse_b, out_a, lse_a)
    assert torch.equal(ours, swapped) and torch.equal(lse, swapped_lse)
    torch.testing.assert_close(lse, torch.logaddexp(lse_a, lse_b))
    weight = torch.sigmoid((lse_a - lse_b).double())[..., None]
    torch.testing.assert_close(ours.double(), weight * out_a + (1 - weight) * out_b, rtol=1e-5, atol=1e-5)


def test_strides_and_ranks(device: str):
    out_a, out_b = torch.randn(2, 5, 3, 8, device=device).unbind(0)
    lse_a, lse_b = torch.randn(2, 5, 3, device=device).unbind(0)
    expected, expected_lse = merge(out_a, lse_a, out_b, lse_b)
    other = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (out_a, lse_a, out_b, lse_b)]
    out, lse = flash_attn_ext.merge(*other)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    out, lse = merge(out_a[0, 0], lse_a[0, 0], out_b[0, 0], lse_b[0, 0])
    assert torch.equal(out, expected[0, 0]) and torch.equal(lse, expected_lse[0, 0])


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 3, 0), (0, 0)], ids=str)
def test_nothing(shape, device: str):
    out, lse = torch.randn(shape, device=device), torch.randn(shape[:-1], device=device)
    merged, merged_lse = merge(out, lse, out, lse)
    assert merged.shape == shape and merged_lse.shape == shape[:-1]


def test_wrong_arguments(device: str):
    out, lse = torch.randn(2, 3, 8, device=device), torch.randn(2, 3, device=device)
    for arguments, words in (
        ((out, lse, out[:1], lse[:1]), "out_b"),
        ((out, lse[:1], out, lse), "lse_a"),
        ((out, lse, out.half(), lse), "out_b"),
        ((out, lse, out, lse.double()), "lse_b"),
    ):
        with pytest.raises(RuntimeError, match=words):
            merge(*arguments)


def test_gradients(device: str):
    tensors = [torch.randn(2, 3, 4, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2)]
    lses = [torch.randn(2, 3, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2)]
    arguments = (tensors[0], lses[0], tensors[1], lses[1])
    assert torch.autograd.gradcheck(merge, arguments)
    assert torch.autograd.gradgradcheck(merge, arguments)


def test_gradients_of_the_whole_through_merge(device: str):
    """Attention over two halves of the keys, merged, has the gradients of one call."""
    query, key, value = (
        torch.randn(1, 2, size, 8, dtype=torch.float64, device=device, requires_grad=True) for size in (9, 20, 20)
    )
    parts = [forward(query, key[:, :, part], value[:, :, part]) for part in (slice(0, 13), slice(13, 20))]
    grad = torch.randn(1, 2, 9, 8, dtype=torch.float64, device=device)
    mine = torch.autograd.grad(merge(*parts[0], *parts[1])[0], (query, key, value), grad)
    true = torch.autograd.grad(forward(query, key, value)[0], (query, key, value), grad)
    for ours, theirs in zip(mine, true, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=dtype_name)
def test_backward_from_foreign_results(dtype: torch.dtype, device: str):
    """Ring attention: each part's backward gets the merged out and lse; the parts' gradients are those of the whole."""
    case = Case("", heads=4, kv_heads=2, rows=50, keys=96, head_dim=32)
    inputs = make_inputs(case, dtype, device)
    whole = run_flash(case, inputs, gradients=True, grad_lse=True)
    parts = [slice(0, 40), slice(40, 96)]
    results = [forward(inputs.query, inputs.key[:, :, part], inputs.value[:, :, part]) for part in parts]
    out, lse = merge(*results[0], *results[1])
    gradients = [
        torch.ops.flash.attention_backward(
            inputs.grad_out, inputs.grad_lse, inputs.query, inputs.key[:, :, part], inputs.value[:, :, part], out, lse,
            None, None, None, None, [True, True, True, False, False],
        )
        for part in parts
    ]  # fmt: skip
    joined = {
        "dquery": gradients[0][0].double() + gradients[1][0].double(),
        "dkey": torch.cat([gradients[0][1], gradients[1][1]], 2),
        "dvalue": torch.cat([gradients[0][2], gradients[1][2]], 2),
    }
    tolerance = 1e-11 if dtype == torch.float64 else 20 * torch.finfo(dtype).eps
    for name, tensor in joined.items():
        torch.testing.assert_close(tensor.double(), whole[name].double(), rtol=tolerance, atol=tolerance, msg=name)
