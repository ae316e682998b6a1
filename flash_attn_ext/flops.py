"""Flop formulas for torch.utils.flop_counter, in its own convention: a multiply-add counts 2 and masks count as if open."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

Shape = Sequence[int]


def _products(query: Shape, key: Shape, value: Shape, of_scores: int, of_values: int) -> int:
    """Flops of `of_scores` products of the size of Q K^T and `of_values` of the size of P V, each over all heads of query."""
    batch, heads, rows, head_dim = query
    keys, value_dim = key[-2], value[-1]
    return 2 * batch * heads * rows * keys * (of_scores * head_dim + of_values * value_dim)


@register_flop_formula(torch.ops.flash.attention_forward)
def forward(query: Shape, key: Shape, value: Shape, *args: Any, out_shape: Any = None, **options: Any) -> int:
    """S = Q K^T and O = P V."""
    return _products(query, key, value, of_scores=1, of_values=1)


@register_flop_formula(torch.ops.flash.attention_backward)
def backward(
    grad_out: Shape, grad_lse: Shape | None, query: Shape, key: Shape, value: Shape,
    *args: Any, out_shape: Any = None, **options: Any,
) -> int:  # fmt: skip
    """S again, dQ = dS K and dK = dS^T Q; dP = dO V^T and dV = P^T dO."""
    return _products(query, key, value, of_scores=3, of_values=2)


def _dense(query: Shape, key: Shape, value: Shape, rows: int, keys: int, cu_seqlens: Shape) -> tuple[Shape, Shape, Shape]:
    """Packed sequences counted as if each had the greatest length: their lengths are on the device and never read."""
    batch = cu_seqlens[0] - 1
    return (batch, query[1], rows, query[2]), (batch, key[1], keys, key[2]), (batch, value[1], keys, value[2])


@register_flop_formula(torch.ops.flash.attention_varlen_forward)
def varlen_forward(
    query: Shape, key: Shape, value: Shape, cu_seqlens_q: Shape, cu_seqlens_k: Shape, max_seqlen_q: int, max_seqlen_k: int,
    *args: Any, out_shape: Any = None, **options: Any,
) -> int:  # fmt: skip
    return _products(*_dense(query, key, value, max_seqlen_q, max_seqlen_k, cu_seqlens_q), of_scores=1, of_values=1)


@register_flop_formula(torch.ops.flash.attention_varlen_backward)
def varlen_backward(
    grad_out: Shape, grad_lse: Shape | None, query: Shape, key: Shape, value: Shape, out: Shape, lse: Shape,
    cu_seqlens_q: Shape, cu_seqlens_k: Shape, max_seqlen_q: int, max_seqlen_k: int,
    *args: Any, out_shape: Any = None, **options: Any,
) -> int:  # fmt: skip
    return _products(*_dense(query, key, value, max_seqlen_q, max_seqlen_k, cu_seqlens_q), of_scores=3, of_values=2)


@register_flop_formula(torch.ops.flash.attention_decode)
def decode(
    query: Shape, k_cache: Shape, v_cache: Shape, cache_seqlens: Shape | None = None, block_table: Shape | None = None,
    *args: Any, out_shape: Any = None, rows_first: bool = False, **options: Any,
) -> int:  # fmt: skip
    """As if every cache were full: how full it is only the device knows."""
    if rows_first:
        query, k_cache, v_cache = ((shape[0], shape[2], shape[1], shape[3]) for shape in (query, k_cache, v_cache))
    batch = query[0]
    keys = k_cache[2] * (1 if block_table is None else block_table[1])
    key, value = (batch, k_cache[1], keys, k_cache[3]), (batch, v_cache[1], keys, v_cache[3])
    return _products(query, key, value, of_scores=1, of_values=1)
