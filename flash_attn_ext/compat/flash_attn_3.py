"""flash_attn_interface of FlashAttention-3: no dropout, no ALiBi; lse of a row that sees nothing is -inf.

num_splits, pack_gqa, sm_margin and scheduler_metadata steer that package's speed only: they are accepted and not used. fp8 scales
(q_descale, ...), qv, attention_chunk, seqused_q and cu_seqlens_k_new raise.
"""

import math

import torch
from torch import Tensor

from . import _calls
from ._calls import Lengths, options, refuse
from .flash_attn_interface import cache_of, prepare

Window = tuple[int, int]
Result = Tensor | tuple[Tensor, Tensor]


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False, qv: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    window_size: Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """Attention of q [B, L, H, D] over k, v [B, S, Hk, D]. With return_attn_probs: (out, lse [B, H, L])."""
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    out, lse = _calls.dense(q, k, v, options(softmax_scale, causal, window_size, softcap, deterministic=deterministic))
    return (out, lse) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor, softmax_scale: float | None = None, causal: bool = False, q_descale: Tensor | None = None,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None, window_size: Window = (-1, -1), attention_chunk: int = 0,
    softcap: float = 0.0, deterministic: bool = False, num_heads_q: int | None = None, sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """qkv [B, L, 3, H, D], or [B, L, num_heads_q + 2 Hk, D]."""
    if qkv.dim() != 4:
        q, k, v = _calls.unpacked("qkv", qkv, 2, 3, "[B, L, 3, H, D], or [B, L, num_heads_q + 2 Hk, D]")
    elif num_heads_q is None:
        raise ValueError("num_heads_q is needed where qkv has four dimensions.")
    else:
        kv_heads, odd = divmod(qkv.shape[2] - num_heads_q, 2)
        if odd or kv_heads < 1:
            raise ValueError(f"qkv has {qkv.shape[2]} heads: they must be num_heads_q + 2 Hk, num_heads_q = {num_heads_q}.")
        q, k, v = qkv.split([num_heads_q, kv_heads, kv_heads], 2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    window_size: Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """Sequences laid end to end, [total, H, D]. seqused_k [B]: how many keys of each are used; without a derivative. lse [H, total]."""
    refuse(
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
        seqused_q=seqused_q,
    )
    o = options(softmax_scale, causal, window_size, softcap, deterministic=deterministic)
    if seqused_k is None:
        out, lse = _calls.varlen(q, k, v, Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), o)
    else:
        cache = _calls.packed_cache(k, v, cu_seqlens_k, max_seqlen_k, seqused_k)
        out, lse = _calls.decode_packed(q, cu_seqlens_q, max_seqlen_q, cache, o)
    return (out, lse) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None, qv: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None, max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True, scheduler_metadata: Tensor | None = None,
    num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0, return_softmax_lse: bool = False,
) -> Result:  # fmt: skip
    """Attention of q [B, L, H, D], or packed [total, H, D] with cu_seqlens_q and max_seqlen_q, over a cache [B, S, Hk, D] or pages
    [pages, page size, Hk, D] with page_table [B, blocks]. k, v [B, L', Hk, D] are first written behind cache_seqlens. No
    derivative."""
    refuse(
        qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk,
        cu_seqlens_k_new=cu_seqlens_k_new,
    )  # fmt: skip
    o = options(softmax_scale, causal, window_size, softcap)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.numel() - 1
    cache = cache_of(batch, k_cache, v_cache, cache_seqlens, page_table, cache_batch_idx, cache_leftpad)
    if cu_seqlens_q is None:
        q, appended = prepare(q, k, v, cache, rotary_cos, rotary_sin, rotary_interleaved, causal, window_size, rotary_seqlens)
        out, lse = _calls.decode(q, cache, o, appended)
    else:
        if k is not None or v is not None or rotary_cos is not None or rotary_sin is not None:
            raise NotImplementedError("flash_attn_ext.compat does not support k, v or rotary_cos together with cu_seqlens_q.")
        if max_seqlen_q is None:
            raise ValueError("cu_seqlens_q needs max_seqlen_q.")
        out, lse = _calls.decode_packed(q, cu_seqlens_q, max_seqlen_q, cache, o)
    return (out, lse) if return_softmax_lse else out


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Adds up partial results over disjoint keys: out_partial [parts, ..., D], lse_partial [parts, ...], natural logarithm."""
    lse = torch.logsumexp(lse_partial, 0)
    weight = torch.exp(lse_partial - lse.masked_fill(lse == -math.inf, 0.0))
    total = (weight[..., None] * out_partial.float().masked_fill(weight[..., None] == 0.0, 0.0)).sum(0)
    total = total.to(out_partial.dtype if out_dtype is None else out_dtype)
    return (total if out is None else out.copy_(total)), lse


def get_scheduler_metadata(*arguments: object, **options: object) -> None:
    """Nothing is scheduled ahead of a call here."""
    return None
