"""The reference in flash_attn's layout: [B, L, H, D], bottom-right, and packed sequences."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

import reference


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
