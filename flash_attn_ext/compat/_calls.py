"""From flash_attn's layouts and conventions to torch.ops.flash. Bottom-right alignment everywhere."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._arguments import accumulated, draw_seed


class Options(NamedTuple):
    """What every function of the package has."""

    left: int | None
    right: int | None
    scale: float | None
    softcap: float
    alibi_slopes: Tensor | None
    dropout_p: float = 0.0
    deterministic: bool | None = None


def options(
    softmax_scale: float | None, causal: bool, window_size: tuple[int | None, int | None], softcap: float,
    alibi_slopes: Tensor | None = None, dropout_p: float = 0.0, deterministic: bool = False,
) -> Options:  # fmt: skip
    left, right = ends(causal, window_size)
    return Options(left, right, softmax_scale, softcap, alibi_slopes, dropout_p, deterministic or None)


def ends(causal: bool, window_size: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """Of a window. None or any negative number is an open end."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise TypeError(
            f"window_size must be a pair (left, right) of numbers of keys, -1 for an open end, but got {window_size!r}."
        ) from None
    if left is not None and left < 0:
        left = None
    if causal:
        right = 0
    elif right is not None and right < 0:
        right = None
    return left, right


def refuse(**arguments: object) -> None:
    """Raises for the first argument that is neither None nor 0 nor False."""
    for name, value in arguments.items():
        if value is None or (isinstance(value, (int, float)) and not value):
            continue
        raise NotImplementedError(f"flash_attn_ext.compat does not support {name}: leave it out, or use flash_attn itself.")


def unpacked(name: str, tensor: Tensor, dim: int, parts: int, shape: str) -> tuple[Tensor, ...]:
    """Views of a packed tensor, `parts` along `dim`."""
    if tensor.dim() != dim + 3 or tensor.shape[dim] != parts:
        raise ValueError(f"{name} has the sizes {list(tensor.shape)}: it must be {shape}.")
    return tensor.unbind(dim)


def empty_rows_positive(lse: Tensor) -> Tensor:
    """FlashAttention-2's lse of a row that sees nothing is +inf."""
    return lse.masked_fill(lse == -math.inf, math.inf)


def dense(q: Tensor, k: Tensor, v: Tensor, o: Options, seed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[B, L, H, D] -> out [B, L, H, D], lse [B, H, L]."""
    if o.alibi_slopes is None and o.dropout_p == 0.0:
        return torch.ops.flash.attention_rows_first(
            q, k, v, o.left, o.right, True, o.scale, o.softcap, False, o.deterministic
        )  # fmt: skip
    if seed is None:
        seed = draw_seed(q, o.dropout_p)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out, lse = torch.ops.flash.attention_forward(
        q, k, v, None, accumulated(o.alibi_slopes, q), None, seed, window_left=o.left, window_right=o.right,
        bottom_right=True, scale=o.scale, softcap=o.softcap, dropout_p=o.dropout_p, deterministic=o.deterministic,
    )  # fmt: skip
    return out.transpose(1, 2), lse


def dense_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, o: Options, seed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = torch.ops.flash.attention_backward(
        dout.transpose(1, 2), None, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), out.transpose(1, 2), lse, None,
        accumulated(o.alibi_slopes, q), None, seed, [True, True, True, False, False], window_left=o.left, window_right=o.right,
        bottom_right=True, scale=o.scale, softcap=o.softcap, dropout_p=o.dropout_p, deterministic=o.deterministic,
    )  # fmt: skip
    return gradients[0].transpose(1, 2), gradients[1].transpose(1, 2), gradients[2].transpose(1, 2)


class Lengths(NamedTuple):
    """Where the sequences of packed tensors lie."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def varlen(q: Tensor, k: Tensor, v: Tensor, at: Lengths, o: Options, seed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[total, H, D] -> out [total, H, D], lse [H, total]."""
    if seed is None:
        seed = draw_seed(q, o.dropout_p)
    return torch.ops.flash.attention_varlen_forward(
        q, k, v, *at, accumulated(o.alibi_slopes, q), None, seed, window_left=o.left, window_right=o.right, bottom_right=True,
        scale=o.scale, softcap=o.softcap, dropout_p=o.dropout_p, deterministic=o.deterministic,
    )  # fmt: skip


def varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, at: Lengths, o: Options, seed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.flash.attention_varlen_backward(
        dout, None, q, k, v, out, lse, *at, accumulated(o.alibi_slopes, q), None, seed, [True, True, True, False],
        window_left=o.left, window_right=o.right, bottom_right=True, scale=o.scale, softcap=o.softcap, dropout_p=o.dropout_p,
        deterministic=o.deterministic,
    )[:3]  # fmt: skip


class Cache(NamedTuple):
    """Keys and values of sequences, [entries, S, Hk, D], and where they lie."""

    k: Tensor
    v: Tensor
    seqlens: Tensor | None
    block_table: Tensor | None = None
    batch_idx: Tensor | None = None
    leftpad: Tensor | None = None


def decode(q: Tensor, cache: Cache, o: Options, appended: int = 0) -> tuple[Tensor, Tensor]:
    """[B, L, H, D] -> out [B, L, H, D], lse [B, H, L]."""
    return torch.ops.flash.attention_decode(
        q, *cache, o.alibi_slopes, appended=appended, window_left=o.left, window_right=o.right, scale=o.scale,
        softcap=o.softcap, rows_first=True,
    )  # fmt: skip


def decode_packed(q: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, cache: Cache, o: Options) -> tuple[Tensor, Tensor]:
    """Packed queries [total, H, D] over a cache -> out [total, H, D], lse [H, total]. Nothing is read from the device: rows are
    spread out to [B, max_seqlen_q], each sequence at the end, where the bottom-right diagonal finds them."""
    batch, total = cu_seqlens_q.numel() - 1, q.shape[0]
    ends = cu_seqlens_q[1:].long()
    rows = (ends[:, None] - max_seqlen_q + torch.arange(max_seqlen_q, device=q.device)).clamp(0, max(total - 1, 0))
    out, lse = decode(q[rows], cache, o)
    tokens = torch.arange(total, device=q.device)
    sequence = torch.searchsorted(ends, tokens, right=True).clamp(max=batch - 1)
    row = (tokens - ends[sequence] + max_seqlen_q).clamp(0, max_seqlen_q - 1)
    return out[sequence, row], lse[sequence, :, row].transpose(0, 1)


def packed_cache(
    k: Tensor, v: Tensor, cu_seqlens_k: Tensor, max_seqlen_k: int, seqused_k: Tensor, leftpad: Tensor | None = None
) -> Cache:
    """Packed keys [total, Hk, D], of which each sequence uses the first ones only: a cache with pages of one key."""
    table = cu_seqlens_k[:-1, None] + torch.arange(max_seqlen_k, device=k.device, dtype=torch.int32)
    return Cache(k[:, None], v[:, None], seqused_k, table, leftpad=leftpad)


def append(cache: Cache, k: Tensor, v: Tensor) -> None:
    """New keys and values [B, L, Hk, D] behind those of the cache."""
    if k.requires_grad or v.requires_grad:
        k, v = k.detach(), v.detach()
    seqlens, table, index = cache.seqlens, cache.block_table, cache.batch_idx
    torch.ops.flash.cache_append_(cache.k, cache.v, k, v, seqlens, table, index, rows_first=True)


def check_rotary(cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, cache: Cache) -> None:
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(
            f"q and k have the sizes {list(q.shape)} and {list(k.shape)}: they must be [B, L, H, D] and [B, L', Hk, D]."
        )
    keys = cache.k.shape[1] * (1 if cache.block_table is None else cache.block_table.shape[-1])
    if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[0] < keys or 2 * cos.shape[1] > q.shape[-1]:
        raise ValueError(
            f"rotary_cos and rotary_sin have the sizes {list(cos.shape)} and {list(sin.shape)}: "
            f"they must be [positions, rotary_dim / 2] with a position for each of the {keys} keys of the cache "
            f"and rotary_dim at most {q.shape[-1]}."
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor, first: Tensor, interleaved: bool, advance: bool = True) -> Tensor:
    """Rotary embedding of x [B, L, H, D] at positions first[b], first[b] + 1, ... (advance), or all at first[b].

    cos, sin [positions, rotary_dim / 2]. interleaved: dimensions 0 and 1 turn together, else 0 and rotary_dim / 2.
    Su et al. 2021, "RoFormer", section 3.4.2.
    """
    half = cos.shape[-1]
    position = first.long()[:, None] + (torch.arange(x.shape[1], device=x.device) if advance else 0)
    position = position.clamp(0, cos.shape[0] - 1)  # behind a full cache: such rows of k are dropped
    c, s = (table[position][:, :, None].to(torch.float32) for table in (cos, sin))
    turned = x[..., : 2 * half].float()
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    pair = (a * c - b * s, a * s + b * c)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), -1)
