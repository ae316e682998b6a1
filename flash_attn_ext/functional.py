"""The functions that users call: keywords, shapes and errors here; the mathematics behind torch.ops.flash.

Sizes: B batch, H heads of query, Hk heads of key and value (Hk divides H), L query rows, S keys, E head dimension, Ev dimension
of value. Tensors may have any strides: [B, L, H, E] data is passed as x.transpose(1, 2), without a copy. Nested tensors of the
jagged layout [B, H, ragged, E] go to attention_varlen.
"""

from typing import Any, Literal, overload

import torch
from torch import Tensor

from . import _jagged
from ._arguments import Causal, Folded, Window, accumulated, autocast, draw_seed, fold, given, interval, unwrap_causal_bias


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ..., dropout_p: float = ..., causal: Causal = ..., *,
    window: Window | None = ..., scale: float | None = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ..., enable_gqa: bool = ..., return_lse: Literal[False] = ..., deterministic: bool | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ..., dropout_p: float = ..., causal: Causal = ..., *,
    window: Window | None = ..., scale: float | None = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ..., enable_gqa: bool = ..., return_lse: Literal[True], deterministic: bool | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    causal: Causal = False,
    *,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    enable_gqa: bool = True,
    return_lse: bool = False,
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(score) V over the keys that a row sees, in memory O(L + S).

    score = scale * query . key, then softcap * tanh(score / softcap) if softcap > 0, then - slope * |row + d - key| (ALiBi),
    then + attn_mask. d is S - L for bottom-right alignment, else 0. A row that sees no key gives 0 and gradient 0.

    Args:
        query: [..., H, L, E], fp16, bf16, fp32 or fp64. Two dimensions at least; batch dimensions broadcast as in torch.matmul.
        key: [..., Hk, S, E], query's dtype and device.
        value: [..., Hk, S, Ev], query's dtype and device.
        attn_mask: broadcastable to [..., H, L, S]. bool: True takes part. Float (fp32 or query's dtype): added to the score; it
            may hold -inf and may require grad. Or a torch.nn.attention.bias.CausalBias. May be combined with causal and window.
        dropout_p: probability in [0, 1] with which a softmax weight is dropped; the others are scaled by 1 / (1 - p). Applied
            whenever it is > 0: pass `p if module.training else 0.0`.
        causal: True or "top_left": row i sees keys <= i, as SDPA's is_causal. "bottom_right": keys <= i + S - L, so that the
            last row sees every key (a cache of keys, decoding).
        window: (left, right): row i sees keys from i + d - left to i + d + right, both included; None in a place leaves that
            end open. causal closes the right end at 0.
        scale: multiplies query . key. None: 1 / sqrt(E).
        softcap: c > 0 bounds scores to (-c, c) by c * tanh(score / c). 0: off. (Gemma 2, section 2)
        alibi_slopes: [H] or [..., H], fp32. (Press et al. 2022, "Train Short, Test Long", section 3)
        sinks: [H] logits that join the softmax sum but no value; differentiable. (Xiao et al. 2024, "Efficient Streaming
            Language Models with Attention Sinks", section 3.3)
        enable_gqa: query head h reads head h // (H / Hk) of key and value. False: heads must be equal or 1.
        return_lse: also return the logsumexp of the scores; differentiable.
        deterministic: bitwise reproducible gradients. None: as torch.use_deterministic_algorithms says.

    Returns:
        out [..., H, L, Ev] of query's dtype, its dimensions in the order of query's strides. With return_lse also lse [..., H,
        L]: natural logarithm, fp32 (fp64 for fp64), sink included, -inf for a row that sees nothing.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit together (SDPA's own texts where SDPA raises).
        ValueError: an option has a value that is not allowed. TypeError: an option has the wrong type.

    Source: Dao et al. 2022, "FlashAttention", algorithms 1 and 4; Dao 2023, "FlashAttention-2", sections 3.1 and 3.2; the
    softmax is that of Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", section 3.
    """
    if query.is_nested:
        return _jagged.attention(
            attention_varlen, query, key, value, attn_mask, return_lse, dropout_p=dropout_p, causal=causal, window=window,
            scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, deterministic=deterministic,
        )  # fmt: skip
    if attn_mask is not None:
        attn_mask, causal = unwrap_causal_bias(attn_mask, causal, query, key)
    extra = window is not None or softcap != 0.0 or alibi_slopes is not None or sinks is not None or return_lse
    if not extra and deterministic is None and (causal is False or (attn_mask is None and causal in (True, "top_left"))):
        grouped = enable_gqa and query.dim() > 2 and query.shape[-3] != 1  # one head of query broadcasts, a group cannot
        return torch.ops.flash.attention(query, key, value, attn_mask, dropout_p, bool(causal), scale=scale, enable_gqa=grouped)
    span = interval(causal, window, bottom_right=False)
    folded = fold(query, key, value, attn_mask, alibi_slopes, sinks, enable_gqa)
    options = given(scale, softcap, dropout_p, deterministic) | span.given(bottom_right=False)
    out, lse = torch.ops.flash.attention_forward(*_tensors(folded), draw_seed(folded.query, dropout_p), **options)
    return (folded.unfold(out), folded.unfold(lse)) if return_lse else folded.unfold(out)


def _tensors(folded: Folded) -> tuple[Tensor | None, ...]:
    return folded.query, folded.key, folded.value, folded.attn_mask, folded.alibi_slopes, folded.sinks


@overload
def attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, *, dropout_p: float = ..., causal: Causal = ..., window: Window | None = ..., scale: float | None = ...,
    softcap: float = ..., alibi_slopes: Tensor | None = ..., sinks: Tensor | None = ..., return_lse: Literal[False] = ...,
    deterministic: bool | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, *, dropout_p: float = ..., causal: Causal = ..., window: Window | None = ..., scale: float | None = ...,
    softcap: float = ..., alibi_slopes: Tensor | None = ..., sinks: Tensor | None = ..., return_lse: Literal[True],
    deterministic: bool | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    dropout_p: float = 0.0,
    causal: Causal = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """attention() over sequences laid end to end: sequence b has rows cu_seqlens[b] to cu_seqlens[b + 1], empty ones allowed.

    Note the alignment: **causal=True is bottom-right here**, as callers of packed attention expect (the last row of each
    sequence sees all its keys); "top_left" is available. A window without causal is aligned to the bottom right as well.

    Args:
        query: [total_q, H, E]. key: [total_k, Hk, E]. value: [total_k, Hk, Ev]. Rows past the last sequence are not
            read: out is 0 there.
        cu_seqlens_q, cu_seqlens_k: [B + 1] int32 on query's device, ascending from 0. Never read by the host.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths of the sequences.
        alibi_slopes: [H] or [B, H]. The other options are those of attention().

    Returns:
        out [total_q, H, Ev]. With return_lse also lse [H, total_q]: natural logarithm, fp32 (fp64 for fp64).

    Raises: as attention().

    Source: as attention().
    """
    span = interval(causal, window, bottom_right=True)
    query, key, value = autocast(query, key, value)
    out, lse = torch.ops.flash.attention_varlen_forward(
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        accumulated(alibi_slopes, query), accumulated(sinks, query), draw_seed(query, dropout_p),
        **given(scale, softcap, dropout_p, deterministic), **span.given(bottom_right=True),
    )  # fmt: skip
    return (out, lse) if return_lse else out


@overload
def attention_decode(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor | None = ..., *, block_table: Tensor | None = ...,
    cache_batch_idx: Tensor | None = ..., cache_left_pad: Tensor | None = ..., k_new: Tensor | None = ...,
    v_new: Tensor | None = ..., causal: Causal = ..., window: Window | None = ..., scale: float | None = ...,
    softcap: float = ..., alibi_slopes: Tensor | None = ..., sinks: Tensor | None = ..., return_lse: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attention_decode(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor | None = ..., *, block_table: Tensor | None = ...,
    cache_batch_idx: Tensor | None = ..., cache_left_pad: Tensor | None = ..., k_new: Tensor | None = ...,
    v_new: Tensor | None = ..., causal: Causal = ..., window: Window | None = ..., scale: float | None = ...,
    softcap: float = ..., alibi_slopes: Tensor | None = ..., sinks: Tensor | None = ..., return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention_decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None = None,
    *,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_left_pad: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    causal: Causal = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """attention() of few new query rows over a long cache of keys and values, as text generation makes them. No derivative.

    What the index tensors hold is read on the device only, so a call can be captured into a CUDA graph and replayed while the
    cache grows. Note the alignment: **causal=True is bottom-right here** (the last row sees every key of its sequence), and so
    is a window without causal.

    Args:
        query: [B, H, L, E], of the cache's dtype (autocast sees to it): fp16, bf16, fp32 or fp64. Any L; fast where
            L * H / Hk is small.
        k_cache: [B, Hk, S, E] of any strides, last dimension dense. [B, S, Hk, E] memory is passed as x.transpose(1, 2).
            With block_table [pages, Hk, page size, E], pages of any size.
        v_cache: the same with Ev for E.
        cache_seqlens: [B] int32, keys that each sequence has in the cache, without k_new. None: S. Required with k_new.
        block_table: [B, blocks] int32: the i-th page of a sequence, which holds its keys page size * i and following.
        cache_batch_idx: [B] int32: which entry of the cache each sequence has. None: 0, 1, ... Not with block_table.
        cache_left_pad: [B] int32: first keys of each sequence that no row sees. None: 0.
        k_new, v_new: [B, Hk, L', E] and [B, Hk, L', Ev], written into the cache in place behind cache_seqlens; the rows see them.
            cache_seqlens itself stays as it is: add L' before the next call. Rows that the cache has no room for are dropped.
        causal, window, scale, softcap, alibi_slopes, sinks, return_lse: as attention().

    Returns:
        out [B, H, L, Ev]; with return_lse also lse [B, H, L]: natural logarithm, fp32 (fp64 for fp64).

    Raises: as attention().

    Source: Dao et al. 2023, "Flash-Decoding for long-context inference"; pages: Kwon et al. 2023, "Efficient Memory Management
    for Large Language Model Serving with PagedAttention", section 4.1.
    """
    if torch.is_autocast_enabled(query.device.type):
        query, k_new, v_new = (None if x is None else x.to(k_cache.dtype) for x in (query, k_new, v_new))  # type: ignore[assignment]
    appended = 0
    if k_new is not None or v_new is not None:
        if k_new is None or v_new is None or cache_seqlens is None:
            raise ValueError("k_new, v_new and cache_seqlens must be given together.")
        torch.ops.flash.cache_append_(
            k_cache, v_cache, k_new.detach(), v_new.detach(), cache_seqlens, block_table, cache_batch_idx
        )
        appended = k_new.shape[2]  # behind the operator, which refuses other ranks
    options = given(scale, softcap)
    if causal is not False or window is not None:
        options |= interval(causal, window, bottom_right=True).given(bottom_right=True)
    if appended > 0:
        options["appended"] = appended
    out, lse = torch.ops.flash.attention_decode(
        query, k_cache, v_cache, cache_seqlens, block_table, cache_batch_idx, cache_left_pad, alibi_slopes, sinks, **options
    )
    return (out, lse) if return_lse else out


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the results over each.

    Args:
        out_a, out_b: [..., L, Ev], results of attention(..., return_lse=True) for the same rows.
        lse_a, lse_b: [..., L], natural logarithm, fp32 (fp64 for fp64).

    Returns:
        (out, lse) of the same shapes. Where both are empty (-inf, -inf) the result is 0 and -inf; where one is, the other one.

    Raises:
        RuntimeError: shapes, dtypes or devices differ.

    Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", section 3.1.
    """
    return torch.ops.flash.merge(out_a, lse_a, out_b, lse_b)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    causal: Causal = False,
    *,
    window: Window | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    enable_gqa: bool = True,
    deterministic: bool | None = None,
    **ignored: Any,
) -> str:
    """What attention() with these arguments would run, and why: kernel, tile, grid, splits, workspace, and why a faster kernel
    was refused. Runs nothing.

    Arguments as attention(); scale and return_lse change no kernel and are accepted. One sentence per line.

    Raises: as attention().
    """
    if unknown := ignored.keys() - {"scale", "return_lse"}:
        raise TypeError(f"explain() got arguments that attention() does not have: {', '.join(sorted(unknown))}.")
    attn_mask, causal = unwrap_causal_bias(attn_mask, causal, query, key)
    span = interval(causal, window, bottom_right=False)
    folded = fold(query, key, value, attn_mask, alibi_slopes, sinks, enable_gqa)
    return torch.ops.flash.explain(
        *_tensors(folded), window_left=span.left, window_right=span.right, bottom_right=span.bottom_right, softcap=softcap,
        dropout_p=dropout_p, deterministic=deterministic,
    )  # fmt: skip
