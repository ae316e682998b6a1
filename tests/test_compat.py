"""flash_attn_ext.compat: flash_attn's names, arguments, layouts and meaning."""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
import sys

import pytest
import torch
from torch import Tensor

import reference
from flash_attn_ext import compat, merge
from flash_attn_ext.compat import bert_padding, flash_attn_3, flash_attn_interface

COMMON = "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False"
SCALES = "q_descale=None, k_descale=None, v_descale=None"
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
# What callers of flash_attn 2.8 and of FlashAttention-3 may write, positionally and by name.
SIGNATURES = {
    flash_attn_interface: {
        "flash_attn_func": f"q, k, v, {COMMON}",
        "flash_attn_kvpacked_func": f"q, kv, {COMMON}",
        "flash_attn_qkvpacked_func": f"qkv, {COMMON}",
        "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {COMMON}, block_table=None",
        "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {COMMON}",
        "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {COMMON}",
        "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), "
        "softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False",
    },
    flash_attn_3: {
        "flash_attn_func": f"q, k, v, softmax_scale=None, causal=False, qv=None, {SCALES}, window_size=(-1, -1), "
        "attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False",
        "flash_attn_qkvpacked_func": f"qkv, softmax_scale=None, causal=False, {SCALES}, window_size=(-1, -1), attention_chunk=0, "
        "softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False",
        "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, "
        f"qv=None, {SCALES}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, "
        "deterministic=False, sm_margin=0, return_attn_probs=False",
        "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, "
        f"cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, {SCALES}, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, "
        "pack_gqa=None, sm_margin=0, return_softmax_lse=False",
        "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    },
}


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in SIGNATURES.items() for n in names], ids=str)
def test_signatures(module, name: str):
    written = [
        parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
        for parameter in inspect.signature(getattr(module, name)).parameters.values()
    ]
    assert ", ".join(written) == SIGNATURES[module][name]


def normal(*size: int, device: str, grad: bool = True) -> Tensor:
    return torch.randn(*size, device=device, dtype=torch.float64, requires_grad=grad)


def expected(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: tuple[int, int], **options) -> tuple[Tensor, Tensor]:
    """The reference in flash_attn's layout: [B, L, H, D], bottom-right."""
    left, right = (None if end < 0 else end for end in window)
    out, lse = reference.attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), left=left, right=0 if causal else right, bottom_right=True,
        **options,
    )  # fmt: skip
    return out.transpose(1, 2), lse


MEANINGS = [
    {"causal": False, "window": (-1, -1)},
    {"causal": True, "window": (-1, -1)},
    {"causal": False, "window": (7, 3)},
    {"causal": True, "window": (5, -1)},
    {"causal": False, "window": (-1, 4)},
    {"causal": True, "window": (-1, -1), "scale": 0.3, "softcap": 4.0},
    {"causal": False, "window": (9, 9), "alibi_slopes": torch.tensor([0.1, 0.02, 0.3, 0.05])},
]


def ours(meaning: dict) -> dict:
    names = {"window": "window_size", "scale": "softmax_scale"}
    return {names.get(name, name): value for name, value in meaning.items()}


@pytest.mark.parametrize("meaning", MEANINGS, ids=str)
@pytest.mark.parametrize(("rows", "keys"), [(20, 20), (9, 30), (30, 9)])
def test_dense(rows: int, keys: int, meaning: dict, device: str):
    """Values, lse, gradients, all packed forms; rows that see nothing are 0 and have lse +inf."""
    meaning = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in meaning.items()}
    q = normal(2, rows, 4, 16, device=device)
    kv = normal(2, keys, 2, 2, 16, device=device)
    grad = torch.randn_like(q)
    true, true_lse = expected(q, kv[:, :, 0], kv[:, :, 1], **meaning)
    true_grads = torch.autograd.grad(true, (q, kv), grad)
    results = [
        compat.flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], **ours(meaning), return_attn_probs=True),
        compat.flash_attn_kvpacked_func(q, kv, **ours(meaning), return_attn_probs=True),
    ]
    for out, lse, probabilities in results:
        torch.testing.assert_close(out, true)
        torch.testing.assert_close(lse, true_lse.masked_fill(true_lse == -math.inf, math.inf))
        assert probabilities.numel() == 0
        for gradient, truth in zip(torch.autograd.grad(out, (q, kv), grad), true_grads, strict=True):
            torch.testing.assert_close(gradient, truth)
    if "alibi_slopes" not in meaning:
        out, lse = flash_attn_3.flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], **ours(meaning), return_attn_probs=True)
        torch.testing.assert_close((out, lse), (true, true_lse))


def test_the_operator_behind_it(device: str):
    q, k = normal(2, 9, 4, 8, device=device), normal(2, 12, 2, 8, device=device)
    torch.library.opcheck(torch.ops.flash.attention_rows_first.default, (q, k, k), {"window_right": 0, "bottom_right": True})
    with pytest.raises(RuntimeError, match="attention_rows_first.*dimensions"):
        torch.ops.flash.attention_rows_first(q[0], k, k)


def test_qkv_packed(device: str):
    qkv = normal(2, 17, 3, 4, 8, device=device)
    true, _ = expected(*qkv.unbind(2), causal=True, window=(-1, -1))
    true_grad = torch.autograd.grad(true.sum(), qkv)
    heads_in_a_row = qkv.flatten(2, 3)
    for out in (
        compat.flash_attn_qkvpacked_func(qkv, causal=True),
        flash_attn_3.flash_attn_qkvpacked_func(qkv, causal=True),
        flash_attn_3.flash_attn_qkvpacked_func(heads_in_a_row, causal=True, num_heads_q=4),
    ):
        torch.testing.assert_close(out, true)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), qkv, retain_graph=True), true_grad)


class Sequences:
    """Packed tensors of several sequences and the reference over them, one by one."""

    def __init__(self, rows: tuple[int, ...], keys: tuple[int, ...], device: str, heads: int = 4, kv_heads: int = 2):
        self.rows, self.keys = rows, keys
        self.q = normal(sum(rows), heads, 16, device=device)
        self.kv = normal(sum(keys), 2, kv_heads, 16, device=device)
        self.cu_q, self.cu_k = (
            torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device=device) for n in (rows, keys)
        )

    @property
    def lengths(self) -> tuple[Tensor, Tensor, int, int]:
        return self.cu_q, self.cu_k, max(self.rows), max(self.keys)

    def expected(self, used: tuple[int, ...] | None = None, **meaning) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for b, (row, key) in enumerate(zip(self.cu_q.tolist(), self.cu_k.tolist(), strict=True)):
            if b == len(self.rows):
                break
            count = self.keys[b] if used is None else used[b]
            q, kv = self.q[row : row + self.rows[b]], self.kv[key : key + count]
            out, lse = expected(q[None], kv[None, :, 0], kv[None, :, 1], **meaning)
            outs.append(out[0]), lses.append(lse[0])
        return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.parametrize("meaning", MEANINGS[:6], ids=str)
def test_varlen(meaning: dict, device: str):
    at = Sequences((5, 0, 17, 1), (9, 4, 8, 30), device)
    true, true_lse = at.expected(**meaning)
    grad = torch.randn_like(true)
    true_grads = torch.autograd.grad(true, (at.q, at.kv), grad)
    k, v = at.kv.unbind(1)
    for out, lse, _ in (
        compat.flash_attn_varlen_func(at.q, k, v, *at.lengths, **ours(meaning), return_attn_probs=True),
        compat.flash_attn_varlen_kvpacked_func(at.q, at.kv, *at.lengths, **ours(meaning), return_attn_probs=True),
    ):
        torch.testing.assert_close(out, true)
        torch.testing.assert_close(lse, true_lse.masked_fill(true_lse == -math.inf, math.inf))
        for gradient, truth in zip(torch.autograd.grad(out, (at.q, at.kv), grad, retain_graph=True), true_grads, strict=True):
            torch.testing.assert_close(gradient, truth)
    result = flash_attn_3.flash_attn_varlen_func(at.q, k, v, *at.lengths, **ours(meaning), return_attn_probs=True)
    torch.testing.assert_close(result, (true, true_lse))


def test_varlen_qkv_packed(device: str):
    qkv = normal(20, 3, 2, 8, device=device)
    cu = torch.tensor([0, 7, 20], dtype=torch.int32, device=device)
    out = compat.flash_attn_varlen_qkvpacked_func(qkv, cu, 13, causal=True)
    for first, last in ((0, 7), (7, 20)):
        true, _ = expected(*(x[None] for x in qkv[first:last].unbind(1)), causal=True, window=(-1, -1))
        torch.testing.assert_close(out[first:last], true[0])


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


def test_dropout_is_the_same_in_the_private_backward(device: str):
    """out is linear in v under one mask: <dout, out> = <dv, v>."""
    q, k, v = (normal(2, 33, 4, 16, device=device, grad=False) for _ in range(3))
    out, lse, _, state = flash_attn_interface._flash_attn_forward(q, k, v, 0.4, 0.25, False, -1, -1, 0.0, None, False)
    assert not torch.equal(out, flash_attn_interface._flash_attn_forward(q, k, v, 0.4, 0.25, False)[0])
    dout = torch.randn_like(out)
    dv = torch.empty_like(v)
    flash_attn_interface._flash_attn_backward(
        dout, q, k, v, out, lse, None, None, dv, 0.4, 0.25, False, -1, -1, 0.0, None, False, rng_state=state
    )
    torch.testing.assert_close((dout * out).sum(), (dv * v).sum())
    with pytest.raises(ValueError, match="rng_state"):
        flash_attn_interface._flash_attn_backward(dout, q, k, v, out, lse, None, None, dv, 0.4, 0.25, False)


@pytest.mark.parametrize("causal", [False, True])
def test_ring_through_the_private_functions(causal: bool, device: str):
    """Forward parts are merged; backward of each part gets the merged out and lse, as sequence-parallel libraries do it."""
    parts, length = 4, 8
    q, k, v = (normal(2, parts * length, 4, 16, device=device) for _ in range(3))
    true, _ = expected(q, k, v, causal=causal, window=(-1, -1))
    dout = torch.randn_like(true)
    true_grads = torch.autograd.grad(true, (q, k, v), dout)
    chunks = [[x.detach()[:, i * length : (i + 1) * length] for x in (q, k, v)] for i in range(parts)]
    grads = [[torch.zeros_like(x) for x in chunk] for chunk in chunks]
    for i, (row, _, _) in enumerate(chunks):
        out = lse = None
        seen = range(i + 1) if causal else range(parts)
        for j in seen:
            part, part_lse, _, _ = flash_attn_interface._flash_attn_forward(
                row, *chunks[j][1:], dropout_p=0.0, softmax_scale=0.25, causal=causal and i == j, window_size_left=-1,
                window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
            )  # fmt: skip
            part = part.transpose(1, 2)
            out, lse = (part, part_lse) if out is None else merge(out, lse, part, part_lse)
        out = out.transpose(1, 2)
        torch.testing.assert_close(out, true[:, i * length : (i + 1) * length].detach())
        for j in seen:
            dq, dk, dv = (torch.empty_like(x) for x in chunks[j])
            flash_attn_interface._flash_attn_backward(
                dout[:, i * length : (i + 1) * length], row, *chunks[j][1:], out, lse, dq, dk, dv, 0.0, 0.25,
                causal and i == j, -1, -1, 0.0, None, False,
            )  # fmt: skip
            grads[i][0] += dq
            grads[j][1] += dk
            grads[j][2] += dv
    for which in range(3):
        torch.testing.assert_close(torch.cat([g[which] for g in grads], 1), true_grads[which])


def test_private_varlen_functions(device: str):
    at = Sequences((5, 17), (9, 20), device)
    k, v = (x.detach() for x in at.kv.unbind(1))
    true, true_lse = at.expected(causal=True, window=(6, -1))
    out, lse, _, _ = flash_attn_interface._flash_attn_varlen_forward(at.q.detach(), k, v, *at.lengths, 0.0, 0.25, True, 6, 0)
    torch.testing.assert_close((out, lse), (true.detach(), true_lse.detach()))
    dout = torch.randn_like(out)
    dq, dk, dv = torch.empty_like(at.q), torch.empty_like(k), torch.empty_like(v)
    flash_attn_interface._flash_attn_varlen_backward(
        dout, at.q.detach(), k, v, out, lse, dq, dk, dv, *at.lengths, 0.0, 0.25, True, 6, 0, 0.0, None, False
    )
    true_q, true_kv = torch.autograd.grad(true, (at.q, at.kv), dout)
    torch.testing.assert_close(dq, true_q)
    torch.testing.assert_close(torch.stack([dk, dv], 1), true_kv)


def test_combine(device: str):
    q, k, v = (torch.randn(2, n, 4, 16, device=device) for n in (5, 40, 40))
    parts = [
        flash_attn_3.flash_attn_func(q, k[:, i : i + 10], v[:, i : i + 10], return_attn_probs=True) for i in range(0, 40, 10)
    ]
    parts.append((torch.full_like(q, math.nan), torch.full((2, 4, 5), -math.inf, device=device)))  # nothing was seen
    out, lse = flash_attn_3.flash_attn_combine(
        torch.stack([p[0] for p in parts]), torch.stack([p[1].transpose(1, 2) for p in parts])
    )
    true, true_lse = expected(q, k, v, False, (-1, -1))
    torch.testing.assert_close(out, true, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, true_lse.transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_padding_helpers(device: str):
    """There and back; gradients return to the places that they come from."""
    x = normal(3, 7, 2, 4, device=device)
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1], [1, 0, 1, 0, 1, 0, 1]], device=device)
    packed, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask)
    assert (
        cu_seqlens.tolist() == [0, 3, 8, 12] and longest == 5 and used.tolist() == [3, 5, 4] and cu_seqlens.dtype == torch.int32
    )
    assert torch.equal(packed, x[mask.bool()])
    padded = bert_padding.pad_input(packed, indices, 3, 7)
    assert torch.equal(padded, x * mask[..., None, None])
    (gradient,) = torch.autograd.grad(padded.square().sum(), x)
    torch.testing.assert_close(gradient, 2 * x * mask[..., None, None])
    packed, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask, 1 - mask)
    assert cu_seqlens.tolist() == [0, 7, 14, 21] and used.tolist() == [3, 5, 4] and torch.equal(packed, x.flatten(0, 1))
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0, 0], [7, 0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0]], device=device)
    packed, indices, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert cu_seqlens.tolist() == [0, 2, 5, 12, 13, 14, 15] and longest == 7 and packed.shape[0] == 15
    assert torch.equal(bert_padding.index_first_axis_residual(x.flatten(0, 1), indices)[0], packed)


def test_as_flash_attn():
    before = sys.modules.get("flash_attn")
    with compat.as_flash_attn():
        assert importlib.import_module("flash_attn").flash_attn_func is compat.flash_attn_func
        assert importlib.import_module("flash_attn.bert_padding") is bert_padding
        interface = importlib.import_module("flash_attn.flash_attn_interface")
        assert interface._flash_attn_forward is flash_attn_interface._flash_attn_forward
        assert importlib.import_module("flash_attn_interface") is flash_attn_3
    assert sys.modules.get("flash_attn") is before


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: compat.flash_attn_func(x, x, x, dropout_p=0.1, return_attn_probs=True), "return_attn_probs"),
        (lambda x: flash_attn_3.flash_attn_func(x, x, x, qv=x), "qv"),
        (lambda x: flash_attn_3.flash_attn_func(x, x, x, k_descale=x), "k_descale"),
        (lambda x: flash_attn_3.flash_attn_func(x, x, x, attention_chunk=2), "attention_chunk"),
        (lambda x: flash_attn_3.flash_attn_with_kvcache(x, x, x, cu_seqlens_k_new=x), "cu_seqlens_k_new"),
        (lambda x: flash_attn_3.flash_attn_with_kvcache(x, x, x, x, x, cu_seqlens_q=x[0, 0, 0]), "cu_seqlens_q"),
    ],
)
def test_refused_by_name(call, name: str):
    with pytest.raises(NotImplementedError, match=name):
        call(torch.zeros(1, 4, 2, 8))


def test_rotary_needs_keys():
    x = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match="rotary_cos needs k and v"):
        compat.flash_attn_with_kvcache(x, x, x, rotary_cos=x[0, :, 0], rotary_sin=x[0, :, 0])
    with pytest.raises(ValueError, match="cache_seqlens"):
        compat.flash_attn_with_kvcache(x, x, x, x, x)
