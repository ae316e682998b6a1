"""Dtypes, autocast, devices."""

from __future__ import annotations

import pytest
import torch

import flash_attn_ext
from compare import DTYPES, accumulate_type, assert_same, dtype_name

attention = torch.ops.flash.attention
forward = torch.ops.flash.attention_forward
NARROW = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_result_types(dtype: torch.dtype, device: str):
    """D3, D5: fp32 means fp32, fp64 fp64; lse in the accumulate type."""
    query = torch.randn(2, 8, 128, 64, device=device).to(dtype).requires_grad_()
    out, lse = forward(query, query, query)
    out.sum().backward()
    assert out.dtype == dtype and query.grad.dtype == dtype and lse.dtype == accumulate_type(dtype)


def test_float32_is_not_tensor_float32(device: str):
    """Single precision keeps its digits: far below the 1e-3 of ten mantissa bits."""
    query, key, value = (torch.randn(1, 2, 256, 64, device=device) for _ in range(3))
    out, lse = forward(query, key, value)
    expected, expected_lse = forward(query.double(), key.double(), value.double())
    assert (out - expected).abs().max() < 5e-6
    assert (lse - expected_lse).abs().max() < 5e-6


def test_narrow_inputs_are_accumulated_wide(device: str):
    """2000 ones: a sum kept in bf16 stops at 256."""
    value = torch.ones(1, 1, 2000, 16, device=device, dtype=torch.bfloat16)
    query = torch.zeros_like(value, requires_grad=True)
    out, lse = forward(query, query, value)
    assert (out == 1).all()
    assert (lse - torch.log(torch.tensor(2000.0))).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", NARROW, ids=dtype_name)
@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
def test_autocast_joins_mixed_dtypes(place: int, dtype: torch.dtype, device: str):
    """D1: one operand is already narrow, the others come out of a norm in fp32; gradients return in each one's own dtype."""
    leaves = [torch.randn(2, 4, 6, 8, device=device, requires_grad=True) for _ in range(3)]
    leaves[place] = leaves[place].detach().to(dtype).requires_grad_()
    with torch.autocast(device, dtype):
        out = attention(*leaves)
        python_out = flash_attn_ext.attention(*leaves, window=(100, None))
    assert out.dtype == dtype
    assert torch.equal(out, attention(*(x.to(dtype) for x in leaves)))
    assert_same(out, python_out)
    out.float().pow(2).sum().backward()
    for leaf in leaves:
        assert leaf.grad.dtype == leaf.dtype and leaf.grad.any()


def test_autocast_casts_a_float_mask(device: str):
    """D4 and SDPA's rule: fp32 operands and an fp32 mask run in the autocast dtype; bool and fp64 stay."""
    query = torch.randn(2, 4, 6, 8, device=device)
    mask = torch.randn(6, 6, device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16):
        out = attention(query, query, query, mask)
        selected = attention(query, query, query, torch.ones(6, 6, dtype=torch.bool, device=device))
        double = attention(query.double(), query.double(), query.double())
    assert out.dtype == selected.dtype == torch.bfloat16 and double.dtype == torch.float64
    narrow = query.bfloat16()
    assert torch.equal(out, attention(narrow, narrow, narrow, mask.bfloat16()))
    out.sum().backward()
    assert mask.grad.dtype == torch.float32


def test_autocast_switched_off(device: str):
    query = torch.randn(2, 4, 6, 8, device=device)
    with torch.autocast(device, torch.bfloat16), torch.autocast(device, enabled=False):
        assert attention(query, query, query).dtype == torch.float32


def test_autocast_over_a_model(device: str):
    """Parameters stay fp32 and get fp32 gradients; packed attention follows the same rule."""
    projection = torch.nn.Linear(16, 48, device=device)
    x = torch.randn(2, 10, 16, device=device)
    with torch.autocast(device, torch.bfloat16):
        query, key, value = projection(x).view(2, 10, 3, 2, 8).permute(2, 0, 3, 1, 4)
        out = attention(query, key, value, is_causal=True)
        lengths = torch.tensor([0, 10, 20], dtype=torch.int32, device=device)
        packed = [x.float().transpose(1, 2).reshape(20, 2, 8) for x in (query, key, value)]
        varlen = flash_attn_ext.attention_varlen(*packed, lengths, lengths, 10, 10, causal=True)
    assert out.dtype == varlen.dtype == torch.bfloat16
    assert_same(varlen.view(2, 10, 2, 8).transpose(1, 2), out)
    (out.float().sum() + varlen.float().sum()).backward()
    assert projection.weight.grad.dtype == torch.float32


def test_mixed_dtypes_without_autocast(device: str):
    """D2: the error names the three dtypes."""
    query = torch.randn(1, 1, 4, 8, device=device)
    with pytest.raises(RuntimeError, match="float.*Half.*double"):
        attention(query, query.half(), query.double())
    with pytest.raises(RuntimeError, match="float.*Half"):
        forward(query, query.half(), query)


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks"])
def test_dtype_of_per_head_arguments(name: str, device: str):
    """Any floating dtype is read in the accumulate type; integers are refused."""
    query = torch.randn(1, 2, 4, 8, device=device)
    given = torch.rand(2, device=device, dtype=torch.float64)
    expected, _ = forward(query, query, query, **{name: given.float()})
    for dtype in (torch.float64, torch.float32):
        assert torch.equal(forward(query, query, query, **{name: given.to(dtype)})[0], expected)
        assert torch.equal(flash_attn_ext.attention(query, query, query, **{name: given.to(dtype)}), expected)
    with pytest.raises(RuntimeError, match=name):
        forward(query, query, query, **{name: torch.ones(2, device=device, dtype=torch.int64)})


@pytest.mark.parametrize("dtype", NARROW, ids=dtype_name)
def test_python_function_keeps_gradients_of_narrow_sinks(dtype: torch.dtype, device: str):
    """A bf16 model has bf16 sinks: their gradient comes back in bf16."""
    query = torch.randn(1, 2, 16, 8, device=device, dtype=dtype)
    sinks = torch.randn(2, device=device, dtype=dtype, requires_grad=True)
    flash_attn_ext.attention(query, query, query, sinks=sinks).float().pow(2).sum().backward()
    assert sinks.grad.dtype == dtype and sinks.grad.any()


def test_unsupported_dtypes_are_named(device: str):
    for dtype in (torch.complex64, torch.int8):
        query = torch.ones(1, 1, 4, 8, device=device, dtype=dtype)
        with pytest.raises(RuntimeError, match="ComplexFloat|complex|Char|int8"):
            forward(query, query, query)


@pytest.mark.cuda
def test_devices_give_the_same_numbers(cuda: str):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)):
        tensors = [torch.randn(2, 4, 100, 64).to(dtype) for _ in range(3)]
        ours, theirs = forward(*tensors, window_right=0), forward(*(x.to(cuda) for x in tensors), window_right=0)
        torch.testing.assert_close(ours[0], theirs[0].cpu(), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(ours[1], theirs[1].cpu(), rtol=1e-5, atol=1e-5)
