"""flash_attn_ext.compat: flash_attn's names, arguments, layouts and meaning: dense and packed calls, padding, refusals."""

from __future__ import annotations

import importlib
import inspect
import math
import sys

import pytest
import torch
from torch import Tensor

from flash_attn_ext import compat
from flash_attn_ext.compat import bert_padding, flash_attn_3, flash_attn_interface
from flash_attn_layout import MEANINGS, Sequences, expected, normal, ours

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
    with torch.no_grad():  # its views take another way then
        found = torch.func.vmap(compat.flash_attn_func)(*(torch.stack([x, 2 * x]) for x in (q, k, k)))
        torch.testing.assert_close(found[1], compat.flash_attn_func(2 * q, 2 * k, 2 * k))
        assert not found.requires_grad
    heads_first = [x.transpose(1, 2) for x in (q, k, k)]
    same = torch.ops.flash.attention_rows_first(*heads_first, window_right=0, bottom_right=True, heads_first_in=True)
    torch.testing.assert_close(same[0], compat.flash_attn_func(q, k, k, causal=True), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=r"attention_rows_first.*dimensions.*\[B, H, L, E\]"):
        torch.ops.flash.attention_rows_first(q[0], k, k, heads_first_in=True)
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


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: compat.flash_attn_func(x, x, x, window_size=3), TypeError, "window_size must be a pair .*3"),
        (lambda x: compat.flash_attn_func(x, x, x, window_size=None), TypeError, "window_size must be a pair"),
        (lambda x: compat.flash_attn_with_kvcache(x, x, x, window_size=(1, 2, 3)), TypeError, "window_size must be a pair"),
        (lambda x: compat.flash_attn_qkvpacked_func(x), ValueError, r"qkv has the sizes \[1, 4, 2, 8\]: .*\[B, L, 3, H, D\]"),
        (lambda x: compat.flash_attn_qkvpacked_func(x[:, :, None]), ValueError, r"\[B, L, 3, H, D\]"),
        (lambda x: compat.flash_attn_kvpacked_func(x, x[:, :, None]), ValueError, r"kv has the sizes .*\[B, S, 2, Hk, D\]"),
        (lambda x: compat.flash_attn_varlen_qkvpacked_func(x, None, 4), ValueError, r"\[total, 3, H, D\]"),
        (lambda x: compat.flash_attn_varlen_kvpacked_func(x[0], x[0], None, None, 4, 4), ValueError, r"\[total_k, 2, Hk, D\]"),
        (lambda x: flash_attn_3.flash_attn_qkvpacked_func(x[0]), ValueError, r"\[B, L, 3, H, D\], or"),
        (lambda x: flash_attn_3.flash_attn_qkvpacked_func(x, num_heads_q=1), ValueError, "num_heads_q . 2 Hk, num_heads_q = 1"),
    ],
)
def test_wrong_shapes_are_named(call, error, text: str):
    with pytest.raises(error, match=text) as caught:
        call(torch.zeros(1, 4, 2, 8))
    assert "\n" not in str(caught.value)
