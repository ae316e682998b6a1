"""Standard attention, every score in memory: what the self-check compares with. Plain torch, any dtype, O(L S) memory."""

import math

import torch
from torch import Tensor


def visible(
    rows: int, keys: int, left: int | None, right: int | None, bottom_right: bool, device: torch.device | str
) -> Tensor:
    """bool [rows, keys]: the interval of keys that each row sees."""
    row = torch.arange(rows, device=device)[:, None] + (keys - rows if bottom_right else 0)
    key = torch.arange(keys, device=device)
    seen = torch.ones(rows, keys, dtype=torch.bool, device=device)
    if left is not None:
        seen &= key >= row - left
    if right is not None:
        seen &= key <= row + right
    return seen


def attention(
    query: Tensor,  # [B, H, L, E]
    key: Tensor,  # [B, Hk, S, E]
    value: Tensor,  # [B, Hk, S, Ev]
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    keep: Tensor | None = None,  # bool [B, H, L, S], what dropout keeps
    *,
    window_left: int | None = None,
    window_right: int | None = None,
    bottom_right: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of attention_forward, computed in the dtype of the inputs."""
    rows, keys, group = query.shape[-2], key.shape[-2], query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    score = query @ key.transpose(-1, -2) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if softcap > 0:
        score = softcap * torch.tanh(score / softcap)
    if alibi_slopes is not None:
        row = torch.arange(rows, device=query.device)[:, None] + (keys - rows if bottom_right else 0)
        distance = (row - torch.arange(keys, device=query.device)).abs().to(score.dtype)
        score = score - alibi_slopes.to(score.dtype)[..., None, None] * distance
    seen = visible(rows, keys, window_left, window_right, bottom_right, query.device)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        seen = seen & attn_mask
    elif attn_mask is not None:
        score = score + attn_mask.to(score.dtype)
    score = score.masked_fill(~seen, -math.inf)
    if sinks is not None:
        column = sinks.to(score.dtype)[:, None, None].expand(*score.shape[:2], rows, 1)
        score = torch.cat([score, column], -1)
    # A row that sees nothing is computed as if its scores were 0, without gradient: -inf - -inf would be NaN.
    empty = (score == -math.inf).all(-1)
    score = score.masked_fill(empty[..., None], 0.0)
    lse = torch.logsumexp(score, -1)
    weight = torch.exp(score - lse[..., None]).masked_fill(empty[..., None], 0.0)
    lse = lse.masked_fill(empty, -math.inf)
    weight = weight[..., :keys]
    if keep is not None:
        weight = weight * keep / (1 - dropout_p) if dropout_p < 1 else weight * 0
    return weight @ value, lse
