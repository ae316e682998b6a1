"""flash_attn.flash_attn_interface (FlashAttention-2): public functions, and the private ones that other libraries call."""

import torch
from torch import Tensor

from .._arguments import given
from . import _calls
from ._calls import Cache, Lengths, ends, options, refuse

Window = tuple[int, int]
Result = Tensor | tuple[Tensor, Tensor, Tensor | None]


def _result(out: Tensor, lse: Tensor, return_attn_probs: bool, dropout_p: float) -> Result:
    if not return_attn_probs:
        return out
    if dropout_p > 0.0:
        raise NotImplementedError(
            "flash_attn_ext.compat does not support return_attn_probs with dropout: probabilities are never formed."
        )
    return out, _calls.empty_rows_positive(lse), out.new_empty(0)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """Attention of q [B, L, H, D] over k, v [B, S, Hk, D]. With return_attn_probs: (out, lse [B, H, L], an empty tensor); lse of a
    row that sees nothing is +inf."""
    if dropout_p == 0.0 and alibi_slopes is None and not return_attn_probs:
        left, right = ends(causal, window_size)  # the common case, worth some microseconds of the host
        return torch.ops.flash.attention_rows_first(
            q, k, v, left, right, True, softmax_scale, softcap, False, deterministic or None
        )[0]  # fmt: skip
    o = options(softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p, deterministic)
    return _result(*_calls.dense(q, k, v, o), return_attn_probs, dropout_p)


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """kv [B, S, 2, Hk, D]."""
    k, v = _calls.unpacked("kv", kv, 2, 2, "[B, S, 2, Hk, D]")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """qkv [B, L, 3, H, D]."""
    q, k, v = _calls.unpacked("qkv", qkv, 2, 3, "[B, L, 3, H, D]")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:  # fmt: skip
    """Sequences laid end to end, [total, H, D]. With block_table [B, blocks] k and v are pages [pages, page size, Hk, D], without a
    derivative; cu_seqlens_k then gives the lengths only. lse [H, total]."""
    if block_table is None and dropout_p == 0.0 and alibi_slopes is None and not return_attn_probs:
        left, right = ends(causal, window_size)  # the common case, worth some microseconds of the host
        return torch.ops.flash.attention_varlen_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window_left=left, window_right=right,
            scale=softmax_scale, softcap=softcap, deterministic=deterministic or None,
        )[0]  # fmt: skip
    o = options(softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p, deterministic)
    if block_table is not None:
        if dropout_p > 0.0:
            raise NotImplementedError("flash_attn_ext.compat does not support dropout_p together with block_table.")
        cache = cache_of(cu_seqlens_q.numel() - 1, k, v, cu_seqlens_k.diff(), block_table)
        out, lse = _calls.decode_packed(q, cu_seqlens_q, max_seqlen_q, cache, o)
    else:
        out, lse = _calls.varlen(q, k, v, Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), o)
    return _result(out, lse, return_attn_probs, dropout_p)


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """kv [total_k, 2, Hk, D]."""
    k, v = _calls.unpacked("kv", kv, 1, 2, "[total_k, 2, Hk, D]")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """qkv [total, 3, H, D]."""
    q, k, v = _calls.unpacked("qkv", qkv, 1, 3, "[total, 3, H, D]")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0, return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of q [B, L, H, D] over a cache [B, S, Hk, D], or [pages, page size, Hk, D] with block_table [B, blocks]. k, v
    [B, L', Hk, D] are first written behind the cache_seqlens keys of each sequence. Pages may have any size, num_splits is
    chosen here. No derivative."""
    if k is None and v is None and rotary_cos is None and rotary_sin is None and not isinstance(cache_seqlens, int):
        # The common case, worth some microseconds of the host: the operator gets only what was given.
        tables: tuple[Tensor | None, ...] = ()
        if block_table is not None or cache_batch_idx is not None or cache_leftpad is not None or alibi_slopes is not None:
            tables = (block_table, cache_batch_idx, cache_leftpad, alibi_slopes)
        more = given(softmax_scale, softcap)
        if causal or window_size != (-1, -1):
            more["window_left"], more["window_right"] = ends(causal, window_size)
        out, lse = torch.ops.flash.attention_decode(q, k_cache, v_cache, cache_seqlens, *tables, rows_first=True, **more)
    else:
        cache = cache_of(q.shape[0], k_cache, v_cache, cache_seqlens, block_table, cache_batch_idx, cache_leftpad)
        q, appended = prepare(q, k, v, cache, rotary_cos, rotary_sin, rotary_interleaved, causal, window_size)
        out, lse = _calls.decode(q, cache, options(softmax_scale, causal, window_size, softcap, alibi_slopes), appended)
    return (out, lse) if return_softmax_lse else out


def cache_of(
    batch: int, k_cache: Tensor, v_cache: Tensor, cache_seqlens: int | Tensor | None, block_table: Tensor | None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None,
) -> Cache:  # fmt: skip
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=k_cache.device)
    return Cache(k_cache, v_cache, cache_seqlens, block_table, cache_batch_idx, cache_leftpad)


def prepare(
    q: Tensor, k: Tensor | None, v: Tensor | None, cache: Cache, rotary_cos: Tensor | None, rotary_sin: Tensor | None,
    rotary_interleaved: bool, causal: bool, window_size: Window, positions: Tensor | None = None,
) -> tuple[Tensor, int]:  # fmt: skip
    """Rotates q and k, writes k and v into the cache. Returns q and how many keys were added to each sequence."""
    if k is None and v is None:
        if rotary_cos is not None or rotary_sin is not None:
            raise ValueError("rotary_cos needs k and v: without new keys there is nothing to rotate.")
        return q, 0
    if k is None or v is None or cache.seqlens is None:
        raise ValueError("k, v and cache_seqlens must be given together.")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin must be given together.")
    if rotary_cos is not None and rotary_sin is not None:
        _calls.check_rotary(rotary_cos, rotary_sin, q, k, cache)
        if positions is None:
            positions = cache.seqlens if cache.leftpad is None else cache.seqlens - cache.leftpad
        # rows of a call without mask all see the same keys: they stand at one position
        advance = causal or window_size != (-1, -1)
        q = _calls.rotate(q, rotary_cos, rotary_sin, positions, rotary_interleaved, advance)
        k = _calls.rotate(k, rotary_cos, rotary_sin, positions, rotary_interleaved)
    _calls.append(cache, k, v)
    return q, k.shape[1]


@torch.no_grad()
def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, lse, empty, rng_state): rng_state, int64 [2], goes to _flash_attn_backward. lse of a row that sees nothing is -inf, so that
    partial results can be merged."""
    refuse(return_softmax=return_softmax and dropout_p > 0.0)
    o = options(softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes, dropout_p)
    seed = torch.rand(2, dtype=torch.float64, device=q.device)
    out, lse = _calls.dense(q, k, v, o, seed if dropout_p > 0.0 else None)
    return out, lse, q.new_empty(0), seed.view(torch.int64)


@torch.no_grad()
def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False, block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None, seqused_k: Tensor | None = None, zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As _flash_attn_forward, for packed sequences."""
    refuse(return_softmax=return_softmax and dropout_p > 0.0)
    o = options(softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes, dropout_p)
    seed = torch.rand(2, dtype=torch.float64, device=q.device)
    if block_table is None and leftpad_k is None and seqused_k is None:
        at = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        out, lse = _calls.varlen(q, k, v, at, o, seed if dropout_p > 0.0 else None)
    else:
        if dropout_p > 0.0:
            raise NotImplementedError(
                "flash_attn_ext.compat does not support dropout_p with block_table, leftpad_k or seqused_k."
            )
        seqlens = cu_seqlens_k.diff() if seqused_k is None else seqused_k
        if block_table is None:
            cache = _calls.packed_cache(k, v, cu_seqlens_k, max_seqlen_k, seqlens, leftpad_k)
        else:
            cache = cache_of(cu_seqlens_q.numel() - 1, k, v, seqlens, block_table, None, leftpad_k)
        out, lse = _calls.decode_packed(q, cu_seqlens_q, max_seqlen_q, cache, o)
    return out, lse, q.new_empty(0), seed.view(torch.int64)


def _write(results: tuple[Tensor, ...], targets: tuple[Tensor | None, ...]) -> None:
    for result, target in zip(results, targets, strict=True):
        if target is not None:
            target.copy_(result)


def _seed(dropout_p: float, rng_state: Tensor | None) -> Tensor | None:
    if dropout_p <= 0.0:
        return None
    if rng_state is None:
        raise ValueError("rng_state, as the forward function returned it, is needed with dropout.")
    return rng_state.view(torch.float64)


@torch.no_grad()
def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None, dk: Tensor | None,
    dv: Tensor | None, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Writes dq, dk and dv where given. out and softmax_lse may be those of a whole ring. Returns rowsum(dout * out) [B, H, L]."""
    window = (window_size_left, window_size_right)
    o = options(softmax_scale, causal, window, softcap, alibi_slopes, dropout_p, deterministic)
    _write(_calls.dense_backward(dout, q, k, v, out, softmax_lse, o, _seed(dropout_p, rng_state)), (dq, dk, dv))
    return torch.linalg.vecdot(dout.float(), out.float()).transpose(1, 2)


@torch.no_grad()
def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None, dk: Tensor | None,
    dv: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
    softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, rng_state: Tensor | None = None, zero_tensors: bool = False,
) -> Tensor:  # fmt: skip
    """As _flash_attn_backward, for packed sequences. Returns rowsum(dout * out) [H, total]."""
    window = (window_size_left, window_size_right)
    o = options(softmax_scale, causal, window, softcap, alibi_slopes, dropout_p, deterministic)
    at = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    _write(_calls.varlen_backward(dout, q, k, v, out, softmax_lse, at, o, _seed(dropout_p, rng_state)), (dq, dk, dv))
    return torch.linalg.vecdot(dout.float(), out.float()).transpose(0, 1)


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
