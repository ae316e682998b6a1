"""Strides, memory order, alignment: results depend on values only, and outputs keep the inputs' order."""

from __future__ import annotations

import contextlib
import itertools
import math

import pytest
import torch

from compare import dtype_name, poisoned

attention = torch.ops.flash.attention
BATCH, HEADS, ROWS, HEAD_DIM = 2, 3, 37, 24
DTYPES = (torch.float32, torch.bfloat16)


@contextlib.contextmanager
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def run(query, key, value, grad=None, **options) -> dict[str, torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    with poisoned(str(query.device)), deterministic():
        out = attention(*leaves, **options)
        grad = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype) if grad is None else grad
        gradients = torch.autograd.grad(out, leaves, grad)
    return {"out": out.detach(), **dict(zip(("dquery", "dkey", "dvalue"), gradients, strict=True))}


def assert_same(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str = "") -> None:
    for name, tensor in ours.items():
        assert torch.equal(tensor, expected[name]), f"{what} {name}: {(tensor != expected[name]).sum().item()} values differ"


def assert_same_or_rounding(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    """Alignment may choose another CUDA kernel for 16-bit types, which rounds P in another scale; else nothing may change."""
    if ours["out"].device.type == "cpu" or ours["out"].dtype == torch.float32:
        return assert_same(ours, expected, what)
    for name, tensor in ours.items():
        scale = expected[name].abs().max().item() * torch.finfo(tensor.dtype).eps  # one unit in the last place of the largest
        error = (tensor.double() - expected[name].double()).abs().max().item()
        assert error <= 2 * scale, f"{what} {name}: {error:.3e} apart, ulp {scale:.3e}"


UNALIGNED = ("odd-row-stride", "odd-address")


def operands(device: str, dtype: torch.dtype = torch.float32, rows: int = ROWS, keys: int = ROWS, head_dim: int = HEAD_DIM):
    return [torch.randn(BATCH, HEADS, size, head_dim, device=device).to(dtype) for size in (rows, keys, keys)]


def views(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The values of x in memory orders that real programs produce; gaps hold NaN."""
    batch, heads, rows, dim = x.shape
    found = {}
    for order in itertools.permutations(range(3)):
        back = [order.index(place) for place in range(3)]
        found[f"order{order}"] = x.permute(*order, 3).contiguous().permute(*back, 3)
    tokens = x.new_full((batch, heads, 2 * rows, dim), math.nan)
    tokens[:, :, ::2] = x
    found["every-second-token"] = tokens[:, :, ::2]
    packed = x.new_full((batch, rows, 3, heads, dim), math.nan)
    packed[:, :, 1] = x.transpose(1, 2)
    found["packed-qkv"] = packed[:, :, 1].transpose(1, 2)
    found["last-not-dense"] = x.mT.contiguous().mT
    wide = x.new_full((batch, heads, rows, 2 * dim), math.nan)
    wide[..., 1::2] = x
    found["every-second-value"] = wide[..., 1::2]
    shifted = x.new_full((batch, heads, rows, dim + 5), math.nan)
    shifted[..., 1 : 1 + dim] = x
    found["odd-row-stride"] = shifted[..., 1 : 1 + dim]
    flat = x.new_full((x.numel() + 1,), math.nan)
    flat[1:] = x.flatten()
    found["odd-address"] = flat[1:].view(x.shape)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
def test_result_is_independent_of_strides(place: int, dtype: torch.dtype, device: str):
    """L1, L2, L3, L7: one operand at a time, so that borrowed strides show; bitwise."""
    tensors = operands(device, dtype)
    expected = run(*tensors, is_causal=True)
    for name, view in views(tensors[place]).items():
        changed = [view if index == place else tensor for index, tensor in enumerate(tensors)]
        same = assert_same_or_rounding if name in UNALIGNED else assert_same
        same(run(*changed, is_causal=True), expected, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_all_operands_in_other_orders(dtype: torch.dtype, device: str):
    tensors = operands(device, dtype)
    grad = torch.randn(BATCH, HEADS, ROWS, HEAD_DIM, device=device).to(dtype)
    expected = run(*tensors, grad)
    for name in views(tensors[0]):
        same = assert_same_or_rounding if name in UNALIGNED else assert_same
        same(run(*(views(x)[name] for x in tensors), views(grad)[name]), expected, name)


@pytest.mark.parametrize("shape", [(2, 1, 9, 8), (1, 3, 9, 8), (1, 1, 9, 8), (2, 3, 1, 8), (1, 1, 1, 8), (2, 3, 9, 1)], ids=str)
@pytest.mark.parametrize("stride", [0, 1, 7, 1 << 40])
def test_strides_of_single_dimensions_are_ignored(shape, stride: int, device: str):
    """L6, pytorch/pytorch#116333: a dimension of size 1 may carry any stride."""
    tensors = [torch.randn(shape, device=device) for _ in range(3)]
    expected = run(*tensors)
    absurd = [
        x.as_strided(shape, [stride if size == 1 else own for size, own in zip(shape, x.stride(), strict=True)])
        for x in tensors
    ]
    result = run(*absurd)
    assert_same(result, expected)
    assert all(tensor.untyped_storage().nbytes() < 1 << 20 for tensor in result.values())


@pytest.mark.parametrize("rows", [1, 7, 43, 129])
@pytest.mark.parametrize("head_dim", [40, 72])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_misaligned_slices(rows: int, head_dim: int, dtype: torch.dtype, device: str):
    """L7: a slice of the last dimension starts at no multiple of the vector width."""
    tensors = operands(device, dtype, rows, rows, head_dim)
    expected = run(*tensors, is_causal=True)
    for offset in (1, 3):
        sliced = []
        for tensor in tensors:
            buffer = tensor.new_full((*tensor.shape[:3], head_dim + 4), math.nan)
            buffer[..., offset : offset + head_dim] = tensor
            sliced.append(buffer[..., offset : offset + head_dim])
        assert_same_or_rounding(run(*sliced, is_causal=True), expected, f"offset {offset}")


def test_multi_query_split_of_packed_projection(device: str):
    """L5, NVIDIA/TransformerEngine#1195: one tensor split 16 + 1 + 1 along the heads."""
    packed = torch.randn(200, 1, 18, 64, device=device)
    query, key, value = (x.permute(1, 2, 0, 3) for x in packed.split([16, 1, 1], 2))
    assert_same(
        run(query, key, value, is_causal=True, enable_gqa=True),
        run(query.contiguous(), key.contiguous(), value.contiguous(), is_causal=True, enable_gqa=True),
    )


def test_expanded_operands(device: str):
    """Stride 0: one key and value for the whole batch, never copied out by the caller."""
    query = torch.randn(4, 2, 20, 16, device=device)
    key, value = (torch.randn(1, 2, 30, 16, device=device) for _ in range(2))
    expanded = run(query, key.expand(4, -1, -1, -1), value.expand(4, -1, -1, -1))
    copied = run(query, key.expand(4, -1, -1, -1).contiguous(), value.expand(4, -1, -1, -1).contiguous())
    assert_same(expanded, copied)


def dense_order(x: torch.Tensor) -> list[int]:
    """Dimensions by stride, outermost first, without those of size 1."""
    return [dim for dim in sorted(range(x.dim()), key=lambda dim: -x.stride(dim)) if x.size(dim) > 1]


def is_dense(x: torch.Tensor) -> bool:
    expected = 1
    for dim in reversed(dense_order(x)):
        if x.stride(dim) != expected:
            return False
        expected *= x.size(dim)
    return True


@pytest.mark.parametrize("value_dim", [HEAD_DIM, 16])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_outputs_keep_the_order_of_their_inputs(order, value_dim: int, device: str):
    """L10: out and dquery lie as query, dkey as key, dvalue as value; the fake kernel says the same."""
    back = [order.index(place) for place in range(3)]

    def make(rows, dim):
        size = [(BATCH, HEADS, rows)[place] for place in order]
        return torch.randn(*size, dim, device=device).permute(*back, 3)

    query, key = make(ROWS, HEAD_DIM), torch.randn(BATCH, HEADS, 29, HEAD_DIM, device=device)
    value = torch.randn(BATCH, 29, HEADS, value_dim, device=device).transpose(1, 2)
    result = run(query, key, value)
    for name, like in (("out", query), ("dquery", query), ("dkey", key), ("dvalue", value)):
        assert is_dense(result[name]), name
        assert dense_order(result[name]) == dense_order(like), name
        fake = run(query.to("meta"), key.to("meta"), value.to("meta"))[name] if device == "cpu" else None
        assert fake is None or fake.stride() == result[name].stride(), name


def test_rows_first_output_can_be_viewed(device: str):
    """L10, pytorch/pytorch#138340: what follows attention in every model, without a copy."""
    query = torch.randn(1, 100, 4, 32, device=device).transpose(1, 2)
    out = attention(query, query, query)
    assert out.transpose(1, 2).is_contiguous()
    assert out.transpose(1, 2).view(1, 100, 128).data_ptr() == out.data_ptr()


def test_output_of_a_packed_projection_is_dense(device: str):
    packed = torch.randn(2, 50, 3, 4, 16, device=device)
    query, key, value = (x.transpose(1, 2) for x in packed.unbind(2))
    result = run(query, key, value)
    for name in ("out", "dquery", "dkey", "dvalue"):
        assert result[name].transpose(1, 2).is_contiguous(), name


def test_layout_of_lse(device: str):
    query = torch.randn(2, 50, 4, 16, device=device).transpose(1, 2)
    assert torch.ops.flash.attention_forward(query, query, query)[1].stride() == (200, 50, 1)


def test_inputs_are_not_written(device: str):
    tensors = operands(device)
    copies = [x.clone() for x in tensors]
    run(*tensors)
    assert all(torch.equal(x, copy) for x, copy in zip(tensors, copies, strict=True))
