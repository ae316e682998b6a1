"""Sizes around 2^31 elements and 65535 blocks. Each test says what it needs and skips where that is not free."""

from __future__ import annotations

import pytest
import torch

from compare import poisoned

pytestmark = [pytest.mark.cuda, pytest.mark.big]
forward = torch.ops.flash.attention_forward


@pytest.fixture
def memory(cuda: str):
    """need(gibibytes): skips the test where they are not free."""
    torch.cuda.empty_cache()

    def need(gibibytes: float) -> str:
        free = torch.cuda.mem_get_info()[0] / (1 << 30)
        if free < gibibytes:
            pytest.skip(f"needs {gibibytes} GiB of GPU memory, {free:.0f} are free")
        return cuda

    yield need
    torch.cuda.empty_cache()


def normal(*size: int, device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(size, device=device, dtype=dtype)


def compare_samples(tensors, samples, **options) -> None:
    """Forward and backward of the whole batch, and of some samples alone: deterministic, so bit by bit up to a split of the keys."""
    leaves = [tensor.requires_grad_() for tensor in tensors]
    out, lse = forward(*leaves, **options)
    grad = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, grad)
    for index in samples:
        alone = [tensor[index : index + 1].detach().requires_grad_() for tensor in leaves]
        own, own_lse = forward(*alone, **options)
        own_gradients = torch.autograd.grad(own, alone, grad[index : index + 1])
        torch.testing.assert_close(out[index], own[0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse[index], own_lse[0], rtol=1e-4, atol=1e-4)
        for whole, part in zip(gradients, own_gradients, strict=True):
            torch.testing.assert_close(whole[index], part[0], rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize(
    "shape", [(65536, 8, 4, 64), (100000, 1, 10, 16), (65536, 1, 16, 80), (1, 65536, 10, 16), (1, 71280, 3, 128)]
)
def test_many_batches_and_heads(shape, memory):
    """S1, S2: more than 65535 batches or heads; strides of the fake kernel agree (S5)."""
    device = memory(8)
    tensors = [normal(*shape, device=device) for _ in range(3)]
    if shape[0] > 1:
        compare_samples(tensors, (0, 1, 65534, shape[0] - 1), window_right=0)
        return
    out, _ = forward(*tensors)
    last, _ = forward(*(x[:, -2:] for x in tensors))
    torch.testing.assert_close(out[:, -2:], last, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("batch", [65535, 65536])
def test_fake_strides_of_many_batches(batch: int, memory):
    device = memory(4)
    leaves = [normal(batch, 2, 3, 8, device=device).requires_grad_() for _ in range(3)]
    out, _ = forward(*leaves)
    gradients = torch.autograd.grad(out.sum(), leaves)
    metas = [leaf.detach().to("meta").requires_grad_() for leaf in leaves]
    fake, _ = forward(*metas)
    for real, meta in zip((out, *gradients), (fake, *torch.autograd.grad(fake.sum(), metas)), strict=True):
        assert real.stride() == meta.stride()


@pytest.mark.parametrize("batch", [399, 400, 410])
def test_workspace_past_two_to_the_thirty_one(batch: int, memory):
    """S6: 400 * 4 * 10496 * 128 is just above 2^31 elements of query."""
    device = memory(40)
    query = normal(batch, 4, 10496, 128, device=device)
    key, value = (normal(batch, 4, 128, 128, device=device) for _ in range(2))
    compare_samples([query, key, value], (0, batch // 2, batch - 1))


def test_key_offsets_past_two_to_the_thirty_one(memory):
    """S7: 32 * 350000 * 12 * 64 elements of key."""
    device = memory(75)
    query = normal(32, 12, 500, 64, device=device)
    key, value = (normal(32, 350000, 12, 64, device=device).transpose(1, 2) for _ in range(2))
    out, lse = forward(query, key, value)
    for index in (0, 15, 31):
        own, own_lse = forward(*(x[index : index + 1] for x in (query, key, value)))
        torch.testing.assert_close(out[index], own[0], rtol=2e-2, atol=2e-3)
        torch.testing.assert_close(lse[index], own_lse[0], rtol=1e-4, atol=1e-4)


def test_packed_projection_past_two_to_the_thirty_one(memory):
    """S7: S = 262144 rows of 3 * 48 * 128 values: offsets inside one sequence pass 2^31. Windowed, so that it ends today."""
    device = memory(40)
    packed = normal(1, 262144, 3, 48, 64, device=device)
    query, key, value = (x.transpose(1, 2) for x in packed.unbind(2))
    out, _ = forward(query, key, value, window_left=255, window_right=0)
    tail = [x[:, :, -1024:] for x in (query, key, value)]
    own, _ = forward(*tail, window_left=255, window_right=0)
    torch.testing.assert_close(out[:, :, -512:], own[:, :, -512:], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("heads, rows, head_dim", [(8, 49999, 64), (3, 53936, 128)])
def test_mask_offsets_past_two_to_the_thirty_one(heads: int, rows: int, head_dim: int, memory):
    """S9: a bool mask with more than 2^31 elements, forward and backward."""
    device = memory(15)
    leaves = [normal(1, heads, rows, head_dim, device=device).requires_grad_() for _ in range(3)]
    mask = torch.ones(1, 1, rows, rows, dtype=torch.bool, device=device)
    mask[..., -1, 7] = False
    with poisoned(device):
        out, _ = forward(*leaves, mask)
        grad = torch.randn_like(out)
        masked = torch.autograd.grad(out, leaves, grad)
    plain, _ = forward(*leaves)
    unmasked = torch.autograd.grad(plain, leaves, grad)
    torch.testing.assert_close(out[:, :, :-1], plain[:, :, :-1], rtol=2e-2, atol=1e-3)
    for ours, theirs in zip(masked, unmasked, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)


def test_many_tokens_of_wide_heads(memory):
    """S11: 513 * 512 tokens of 32 heads of 256: packed offsets pass 2^31 between the last sequences."""
    device = memory(40)
    count, length = 513, 512
    query = normal(count * length, 32, 256, device=device)
    key = normal(count * length, 8, 256, device=device)
    cu = torch.arange(0, (count + 1) * length, length, dtype=torch.int32, device=device)
    out, _ = torch.ops.flash.attention_varlen_forward(query, key, key, cu, cu, length, length, window_right=0)
    for index in (0, 511, 512):
        part = slice(index * length, (index + 1) * length)
        own, _ = forward(*(x[part].transpose(0, 1)[None] for x in (query, key, key)), window_right=0)
        torch.testing.assert_close(out[part].transpose(0, 1), own[0], rtol=2e-2, atol=2e-2)


def test_grouped_backward(memory):
    """Q2: 16 query heads on 2 kv heads of 512: memory stays that of the gradients."""
    device = memory(24)
    query = normal(24, 16, 256, 512, device=device).requires_grad_()
    key, value = (normal(24, 2, 12288, 512, device=device).requires_grad_() for _ in range(2))
    out, _ = forward(query, key, value)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 3 * key.numel() * 4 + 4 * query.numel() * 4


@pytest.mark.parametrize("head_dim, dtype", [(512, torch.bfloat16), (64, torch.float32)])
def test_long_grouped_calls(head_dim: int, dtype: torch.dtype, memory):
    """H8: what elsewhere falls back to a quadratic path and runs out of memory at S = 8192."""
    device = memory(12)
    query = normal(1, 32, 8192, head_dim, device=device, dtype=dtype).requires_grad_()
    key, value = (normal(1, 4, 8192, head_dim, device=device, dtype=dtype).requires_grad_() for _ in range(2))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    forward(query, key, value, window_right=0)[0].sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 8 * query.numel() * 4
