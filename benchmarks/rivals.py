"""Implementations of attention under one signature: call(query, key, value, mask, cell) on [B, H, S, D] views.

A rival that is not installed, or cannot run on the device, says so in one line and is left out.
"""

import functools
import importlib.util
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn_ext

from .cells import Cell

Attention = Callable[..., Tensor]  # (query, key, value, mask, cell)


@dataclass(frozen=True)
class Rival:
    name: str
    attention: Attention
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    module: str = "torch"  # what must be importable
    cuda_only: bool = True

    def absent(self, device: str) -> str:
        """Why it cannot run here; '' if it can."""
        if self.cuda_only and device != "cuda":
            return "runs on CUDA only"
        try:
            found = importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:
            found = False
        return "" if found else f"{self.module} is not installed"


def _ours(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cell: Cell) -> Tensor:
    return flash_attn_ext.attention(query, key, value, mask, causal=cell.causal, deterministic=cell.deterministic or None)


def _ours_op(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cell: Cell) -> Tensor:
    gqa = cell.heads != cell.kv_heads
    return torch.ops.flash.attention(query, key, value, mask, 0.0, cell.causal, enable_gqa=gqa)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cell: Cell) -> Tensor:
    gqa = cell.heads != cell.kv_heads
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=cell.causal, enable_gqa=gqa)


def _sdpa_rival(name: str, backend: SDPBackend, cuda_only: bool = True) -> Rival:
    return Rival(f"sdpa-{name}", _sdpa, lambda: sdpa_kernel(backend), cuda_only=cuda_only)


def _standard(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cell: Cell) -> Tensor:
    """The textbook's three steps, every score in memory."""
    group = cell.heads // cell.kv_heads
    score = query @ key.repeat_interleave(group, 1).transpose(-1, -2) / math.sqrt(cell.head_dim)
    if cell.causal:
        future = torch.ones(cell.rows, cell.keys, dtype=torch.bool, device=query.device).triu(1)
        score = score.masked_fill(future, -math.inf)
    if mask is not None:
        score = score + mask
    return torch.softmax(score, -1) @ value.repeat_interleave(group, 1)


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    from torch import _dynamo as dynamo
    from torch.nn.attention.flex_attention import flex_attention

    dynamo.config.recompile_limit = 1000  # every shape is compiled: past the limit it would quietly run uncompiled
    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def _causal_blocks(rows: int, keys: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, row, col: row >= col, None, None, rows, keys, device=device)


def _flex(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cell: Cell) -> Tensor:
    blocks = _causal_blocks(cell.rows, cell.keys, query.device.type) if cell.causal else None
    add = None
    if mask is not None:
        full = mask.expand(cell.batch, cell.heads, cell.rows, cell.keys)

        def add(score: Tensor, b: Tensor, h: Tensor, row: Tensor, col: Tensor) -> Tensor:
            return score + full[b, h, row, col]

    gqa = cell.heads != cell.kv_heads
    return _compiled_flex()(query, key, value, score_mod=add, block_mask=blocks, enable_gqa=gqa)


def _package(module: str, **options: str) -> Attention:
    """flash_attn_func of one of the flash-attention packages: [B, S, H, D], no float masks."""

    def run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cell: Cell) -> Tensor:
        if mask is not None:
            raise NotImplementedError("takes no float mask")
        function = importlib.import_module(module).flash_attn_func
        tensors = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out = function(*tensors, causal=cell.causal, deterministic=cell.deterministic)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return run


def _xformers(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cell: Cell) -> Tensor:
    from xformers import ops  # type: ignore[import-not-found, unused-ignore]

    if cell.heads != cell.kv_heads:
        raise NotImplementedError("grouped heads are not measured here")
    bias = mask if mask is None else mask.expand(cell.batch, cell.heads, cell.rows, cell.keys)
    bias = ops.LowerTriangularMask() if cell.causal else bias
    tensors = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return ops.memory_efficient_attention(*tensors, attn_bias=bias).transpose(1, 2)


OURS = "ours"
RIVALS = {
    rival.name: rival
    for rival in (
        Rival(OURS, _ours, module="flash_attn_ext", cuda_only=False),
        Rival("ours-op", _ours_op, module="flash_attn_ext", cuda_only=False),
        Rival("sdpa", _sdpa, cuda_only=False),
        _sdpa_rival("flash", SDPBackend.FLASH_ATTENTION, cuda_only=False),
        _sdpa_rival("cudnn", SDPBackend.CUDNN_ATTENTION),
        _sdpa_rival("efficient", SDPBackend.EFFICIENT_ATTENTION),
        _sdpa_rival("math", SDPBackend.MATH, cuda_only=False),
        Rival("standard", _standard, cuda_only=False),
        Rival("flex", _flex),
        Rival("flash_attn", _package("flash_attn"), module="flash_attn"),
        Rival("flash_attn_3", _package("flash_attn_interface"), module="flash_attn_interface"),
        Rival("flash_attn.cute", _package("flash_attn.cute"), module="flash_attn.cute"),
        Rival("xformers", _xformers, module="xformers"),
    )
}


def choose(names: list[str], device: str) -> tuple[list[Rival], dict[str, str]]:
    """The rivals that can run here, and why the others cannot."""
    if unknown := [name for name in names if name not in RIVALS]:
        raise SystemExit(f"--rivals: {', '.join(unknown)}: unknown; known are {', '.join(RIVALS)}")
    absent = {name: why for name in names if (why := RIVALS[name].absent(device))}
    return [RIVALS[name] for name in names if name not in absent], absent
