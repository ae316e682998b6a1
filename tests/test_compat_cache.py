"""flash_attn_ext.compat over a cache: flash_attn_with_kvcache, rotary embedding, pages, keys that are used in part."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flash_attn_ext import compat
from flash_attn_ext.compat import flash_attn_3
from flash_attn_layout import MEANINGS, Sequences, expected, ours


@pytest.mark.parametrize("page", [1, 4, 16])
def test_varlen_over_pages(page: int, device: str):
    """Prefill over a paged cache: packed rows, each sequence bottom-right."""
    at = Sequences((5, 0, 17, 1), (9, 4, 18, 30), device)
    blocks = -(-max(at.keys) // page)
    table = torch.randperm(4 * blocks).view(4, blocks).to(torch.int32)
    pages = torch.full((4 * blocks, page, 2, 2, 16), math.nan, dtype=torch.float64, device=device)
    with torch.no_grad():
        for b, (first, count) in enumerate(zip(at.cu_k.tolist(), at.keys, strict=False)):
            for j in range(count):
                pages[table[b, j // page], j % page] = at.kv[first + j]
    for meaning in MEANINGS[:6]:
        out, lse, _ = compat.flash_attn_varlen_func(
            at.q,
            pages[:, :, 0],
            pages[:, :, 1],
            *at.lengths,
            **ours(meaning),
            block_table=table.to(device),
            return_attn_probs=True,
        )
        true, true_lse = at.expected(**meaning)
        torch.testing.assert_close(out.detach(), true.detach())
        torch.testing.assert_close(lse.detach(), true_lse.detach().masked_fill(true_lse == -math.inf, math.inf))


def test_used_keys(device: str):
    at = Sequences((5, 3, 7), (9, 12, 8), device)
    used = (4, 12, 0)
    k, v = at.kv.unbind(1)
    seqused = torch.tensor(used, dtype=torch.int32, device=device)
    out = flash_attn_3.flash_attn_varlen_func(at.q, k, v, *at.lengths, seqused_k=seqused, causal=True)
    torch.testing.assert_close(out.detach(), at.expected(used=used, causal=True, window=(-1, -1))[0].detach())


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: list[int], interleaved: bool) -> Tensor:
    """Rotary embedding of one sequence [L, H, D], pair by pair."""
    result, half = x.clone(), cos.shape[1]
    for row, position in enumerate(positions):
        for i in range(half):
            first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            a, b = x[row, :, first], x[row, :, second]
            result[row, :, first] = a * cos[position, i] - b * sin[position, i]
            result[row, :, second] = a * sin[position, i] + b * cos[position, i]
    return result


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("interleaved", [None, True, False])
@pytest.mark.parametrize("page", [None, 4])
def test_with_kvcache(page: int | None, interleaved: bool | None, causal: bool, device: str):
    """New keys are rotated and appended in place, queries rotated, everything seen."""
    lengths, new, keys = (5, 0, 20), 3, 24
    dense = torch.randn(3, keys, 2, 16, device=device), torch.randn(3, keys, 2, 16, device=device)
    k, v, q = (torch.randn(3, new, heads, 16, device=device) for heads in (2, 2, 4))
    angle = torch.rand(40, 4, device=device) * 6
    cos, sin = angle.cos(), angle.sin()
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    caches, table = [x.clone() for x in dense], None
    if page is not None:
        table = torch.randperm(3 * keys // page).view(3, -1).to(torch.int32).to(device)
        for i, x in enumerate(dense):
            caches[i] = torch.empty(3 * keys // page, page, 2, 16, device=device)
            caches[i][table.flatten().long()] = x.reshape(-1, page, 2, 16)
    options = {} if interleaved is None else {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
    out, lse = compat.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=seqlens, block_table=table, causal=causal, return_softmax_lse=True, **options
    )
    for b, length in enumerate(lengths):
        rows, fresh = q[b], k[b]
        if interleaved is not None:
            at = list(range(length, length + new))
            rows = rotated(rows, cos, sin, at if causal else [length] * new, interleaved)
            fresh = rotated(fresh, cos, sin, at, interleaved)
        key = torch.cat([dense[0][b, :length], fresh])
        value = torch.cat([dense[1][b, :length], v[b]])
        true, true_lse = expected(rows[None], key[None], value[None], causal=causal, window=(-1, -1))
        torch.testing.assert_close(out[b : b + 1], true, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[b : b + 1], true_lse, rtol=1e-4, atol=1e-5)
        held = caches[0][b] if page is None else caches[0][table[b].long()].flatten(0, 1)
        torch.testing.assert_close(held[length : length + new], fresh)


def test_kvcache_arguments(device: str):
    """An integer length, entries by index, left padding; FlashAttention-3's packed queries."""
    cache = torch.randn(4, 30, 2, 16, device=device)
    q = torch.randn(2, 5, 4, 16, device=device)
    out = compat.flash_attn_with_kvcache(q, cache[:2], cache[:2], cache_seqlens=11, causal=True)
    torch.testing.assert_close(out, expected(q, cache[:2, :11], cache[:2, :11], True, (-1, -1))[0])
    index = torch.tensor([3, 1], dtype=torch.int32, device=device)
    out = compat.flash_attn_with_kvcache(q, cache, cache, cache_batch_idx=index, window_size=(4, 2))
    torch.testing.assert_close(out, expected(q, cache[[3, 1]], cache[[3, 1]], False, (4, 2))[0])
    pad = torch.tensor([0, 9], dtype=torch.int32, device=device)
    out = compat.flash_attn_with_kvcache(q, cache[:2], cache[:2], cache_leftpad=pad, causal=True)
    torch.testing.assert_close(out[1:], expected(q[1:], cache[1:2, 9:], cache[1:2, 9:], True, (-1, -1))[0])
    packed, cu = q.flatten(0, 1)[:7], torch.tensor([0, 2, 7], dtype=torch.int32, device=device)
    seqlens = torch.tensor([30, 12], dtype=torch.int32, device=device)
    out = flash_attn_3.flash_attn_with_kvcache(
        packed, cache[:2], cache[:2], cache_seqlens=seqlens, cu_seqlens_q=cu, max_seqlen_q=5, causal=True
    )
    torch.testing.assert_close(out[:2], expected(packed[None, :2], cache[:1], cache[:1], True, (-1, -1))[0][0])
    torch.testing.assert_close(out[2:], expected(packed[None, 2:], cache[1:2, :12], cache[1:2, :12], True, (-1, -1))[0][0])


def test_rotary_needs_keys():
    x = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match="rotary_cos needs k and v"):
        compat.flash_attn_with_kvcache(x, x, x, rotary_cos=x[0, :, 0], rotary_sin=x[0, :, 0])
    with pytest.raises(ValueError, match="rotary_cos needs k and v"):
        compat.flash_attn_with_kvcache(x, x, x, rotary_sin=x[0, :, 0])


def test_what_belongs_together():
    """What is left out is named, never passed over."""
    x, seqlens = torch.zeros(1, 4, 2, 8), torch.zeros(1, dtype=torch.int32)
    for options in ({"k": x, "v": x}, {"k": x, "cache_seqlens": seqlens}, {"v": x, "cache_seqlens": seqlens}):
        for module in (compat, flash_attn_3):
            with pytest.raises(ValueError, match="k, v and cache_seqlens must be given together"):
                module.flash_attn_with_kvcache(x, x, x, **options)
    with pytest.raises(ValueError, match="rotary_cos and rotary_sin must be given together"):
        compat.flash_attn_with_kvcache(x, x, x, x, x, rotary_sin=x[0, :, 0], cache_seqlens=seqlens)


@pytest.mark.parametrize("sizes", [((4, 5), (4, 5)), ((3, 4), (3, 4)), ((4, 4), (4, 3)), ((4,), (4,))], ids=str)
def test_rotary_tables_that_do_not_fit(sizes):
    """Wider than the heads, or without a position for each key of the cache."""
    x, seqlens = torch.zeros(1, 4, 2, 8), torch.zeros(1, dtype=torch.int32)
    cos, sin = (torch.ones(size) for size in sizes)
    with pytest.raises(ValueError, match=r"rotary_cos and rotary_sin have the sizes .* each of the 4 keys"):
        compat.flash_attn_with_kvcache(x, x, x, x[:, :1], x[:, :1], cos, sin, seqlens)


def test_rotary_behind_a_full_cache(device: str):
    """The tables end where the cache does: a row that finds no room is dropped, and its position is not looked up."""
    caches = [torch.randn(2, 8, 2, 16, device=device) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    q, k, v = (torch.randn(2, 3, heads, 16, device=device) for heads in (4, 2, 2))
    angle = torch.rand(8, 8, device=device) * 6
    seqlens = torch.tensor([8, 7], dtype=torch.int32, device=device)
    out = compat.flash_attn_with_kvcache(q, *caches, k, v, angle.cos(), angle.sin(), seqlens, rotary_interleaved=False)
    assert torch.equal(caches[0][0], before[0][0]) and torch.equal(caches[1][0], before[1][0])
    held = rotated(k[1, :1], angle.cos(), angle.sin(), [7], False)
    torch.testing.assert_close(caches[0][1, 7:], held)
    assert torch.equal(caches[0][1, :7], before[0][1, :7]) and torch.equal(caches[1][1, 7], v[1, 0])
    rows = rotated(q[1], angle.cos(), angle.sin(), [7] * 3, False)
    true, _ = expected(rows[None], caches[0][1:], caches[1][1:], causal=False, window=(-1, -1))
    torch.testing.assert_close(out[1:], true, rtol=1e-4, atol=1e-5)


def test_expanded_caches_are_not_written():
    """Several sequences would write to one place, in no order."""
    cache, fresh = torch.zeros(1, 4, 2, 8).expand(2, -1, -1, -1), torch.ones(2, 1, 2, 8)
    with pytest.raises(RuntimeError, match="k_cache is expanded.*clone"):
        compat.flash_attn_with_kvcache(fresh, cache, cache, fresh, fresh, cache_seqlens=1)
    assert not cache.any()
