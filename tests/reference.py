"""Plain attention with every feature, written to be read: the oracle of the tests. Quadratic memory, ordinary autograd.

Run in fp64 it is the truth; run in the dtype under test it is the plain implementation that the tolerance is relative to.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def visible_interval(
    rows: int, keys: int, left: int | None, right: int | None, bottom_right: bool, device: torch.device | str = "cpu"
) -> Tensor:
    """Which keys a row sees: [rows, keys] bool. Row i sees [i + d - left, i + d + right], d = keys - rows or 0."""
    diagonal = keys - rows if bottom_right else 0
    row = torch.arange(rows, device=device)[:, None] + diagonal
    key = torch.arange(keys, device=device)[None, :]
    visible = torch.ones(rows, keys, dtype=torch.bool, device=device)
    if left is not None:
        visible &= key >= row - left
    if right is not None:
        visible &= key <= row + right
    return visible


def attention(
    query: Tensor,  # [..., heads, rows, head_dim]
    key: Tensor,  # [..., kv_heads, keys, head_dim]
    value: Tensor,  # [..., kv_heads, keys, value_dim]
    *,
    mask: Tensor | None = None,  # broadcastable to [..., heads, rows, keys]; bool selects, float adds
    left: int | None = None,
    right: int | None = None,
    bottom_right: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,  # [heads] or [batch, heads]
    sinks: Tensor | None = None,  # [heads]
    keep: Tensor | None = None,  # [..., heads, rows, keys] bool: what dropout keeps
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention in the dtype of its inputs: out [..., heads, rows, value_dim] and lse [..., heads, rows], natural log."""
    groups = query.size(-3) // key.size(-3)
    key = key.repeat_interleave(groups, -3)
    value = value.repeat_interleave(groups, -3)
    rows, keys = query.size(-2), key.size(-2)
    if scale is None:
        scale = 1.0 / math.sqrt(query.size(-1))

    score = (query @ key.mT) * scale
    if softcap > 0.0:
        score = softcap * torch.tanh(score / softcap)
    visible = visible_interval(rows, keys, left, right, bottom_right, query.device)
    if alibi_slopes is not None:
        diagonal = keys - rows if bottom_right else 0
        distance = torch.arange(rows, device=query.device)[:, None] + diagonal - torch.arange(keys, device=query.device)
        score = score - alibi_slopes.to(score.dtype)[..., None, None] * distance.abs().to(score.dtype)
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        score = score + mask.to(score.dtype)
        visible = visible & (mask != -math.inf)
    logits = score.masked_fill(~visible, -math.inf)
    if sinks is not None:
        column = sinks.to(logits.dtype)[:, None, None].expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, column], -1)

    # A row that sees nothing: softmax of zeros, then multiplied away, so that neither direction divides by zero.
    alive = (logits != -math.inf).any(-1, keepdim=True)
    logits = logits.masked_fill(~alive, 0.0)
    probability = torch.softmax(logits, -1) * alive
    lse = torch.logsumexp(logits, -1).masked_fill(~alive.squeeze(-1), -math.inf)
    probability = probability[..., :keys]
    if keep is not None:
        survivors = keep.to(probability.dtype) / (1.0 - dropout_p) if dropout_p < 1.0 else torch.zeros_like(probability)
        probability = probability * survivors
    return probability @ value, lse


def attention_varlen(
    query: Tensor,  # [total_q, heads, head_dim]
    key: Tensor,  # [total_k, kv_heads, head_dim]
    value: Tensor,  # [total_k, kv_heads, value_dim]
    cu_seqlens_q: list[int],
    cu_seqlens_k: list[int],
    *,
    alibi_slopes: Tensor | None = None,  # [heads] or [sequences, heads]
    keep: Tensor | None = None,  # [sequences, heads, max rows, max keys] bool
    **options,
) -> tuple[Tensor, Tensor]:
    """One call of `attention` per packed sequence. Rows outside every sequence: out 0, lse -inf. lse [heads, total_q]."""
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    dead_out = query.new_zeros(query.size(1), 1, value.size(-1))
    dead_lse = query.new_full((query.size(1), 1), -math.inf)

    def fill(count: int) -> None:
        outs.append(dead_out.expand(-1, count, -1))
        lses.append(dead_lse.expand(-1, count))

    fill(cu_seqlens_q[0])
    for index in range(len(cu_seqlens_q) - 1):
        row, row_end = cu_seqlens_q[index], cu_seqlens_q[index + 1]
        first, last = cu_seqlens_k[index], cu_seqlens_k[index + 1]
        slopes = alibi_slopes[index] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        kept = keep[index, :, : row_end - row, : last - first] if keep is not None else None
        out, lse = attention(
            query[row:row_end].transpose(0, 1),
            key[first:last].transpose(0, 1),
            value[first:last].transpose(0, 1),
            alibi_slopes=slopes,
            keep=kept,
            **options,
        )
        outs.append(out)
        lses.append(lse)
    fill(query.size(0) - cu_seqlens_q[-1])
    return torch.cat(outs, 1).transpose(0, 1), torch.cat(lses, 1)


def dropout_keeps(seed: Tensor, size: tuple[int, int, int, int], p: float) -> Tensor:
    """What dropout keeps: the published counter-based generator written again, in numpy, element by element.

    Philox4x32-7, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011. One draw serves 8 elements of a
    16 x 16 patch. seed: 2 float64 read as bits; returns bool [batch, heads, rows, keys].
    """
    import numpy as np

    word = [int(bits) for bits in seed.detach().cpu().numpy().view(np.uint64)]
    mixed = word[0] ^ ((word[1] * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF)
    low = np.uint64(0xFFFFFFFF)
    plane, row, col = np.meshgrid(
        np.arange(size[0] * size[1], dtype=np.uint64),
        np.arange(size[2], dtype=np.uint64),
        np.arange(size[3], dtype=np.uint64),
        indexing="ij",
    )
    lane = (row % 8) * 4 + (col % 8) // 2
    counter = [
        ((col // 16) * 32 + lane) & low,
        (row // 16) & low,
        plane & low,
        np.full_like(plane, (word[1] ^ (word[1] >> 32)) & 0xFFFFFFFF),
    ]
    key = [mixed & 0xFFFFFFFF, mixed >> 32]
    for _ in range(7):
        first = counter[0] * np.uint64(0xD2511F53)
        second = counter[2] * np.uint64(0xCD9E8D57)
        counter = [
            (second >> np.uint64(32)) ^ counter[1] ^ np.uint64(key[0]),
            second & low,
            (first >> np.uint64(32)) ^ counter[3] ^ np.uint64(key[1]),
            first & low,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    chosen = np.choose((((col // 8) % 2) * 2 + (row // 8) % 2).astype(np.int64), counter)
    bits = np.where(col % 2 == 1, chosen >> np.uint64(16), chosen & np.uint64(0xFFFF))
    keep = bits < np.uint64(int((1.0 - p) * 65536.0 + 0.5))
    return torch.from_numpy(keep.reshape(size))
