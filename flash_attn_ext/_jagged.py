"""Nested tensors of the jagged layout: a batch of sequences of unequal lengths is a packed call under another name."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _packed(tensor: Tensor, name: str) -> Tensor:
    """[B, H, ragged, D] -> nested [B, ragged, H, D], whose values are [total, H, D]."""
    if tensor.layout != torch.jagged:
        raise RuntimeError(f"{name} is a nested tensor of layout {tensor.layout}: only torch.jagged is supported.")
    if tensor.dim() != 4 or tensor._ragged_idx != 2:  # type: ignore[attr-defined]
        raise RuntimeError(f"{name} must be [B, H, ragged, D] when it is nested: transpose(1, 2) of [B, ragged, H, D].")
    packed = tensor.transpose(1, 2)
    if packed.lengths() is not None:  # type: ignore[attr-defined]
        raise RuntimeError(f"{name} is nested with gaps between its sequences: make it contiguous.")
    return packed


def attention(
    varlen: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    return_lse: bool,
    **options: Any,
) -> Any:
    """attention() by attention_varlen(); causal=True keeps its meaning there, top-left."""
    if not (query.is_nested and key.is_nested and value.is_nested):
        raise RuntimeError("query, key and value must all be nested tensors, or none of them.")
    if attn_mask is not None:
        raise RuntimeError("Nested tensors are not supported when an explicit attn_mask is set: use causal and window.")
    if return_lse:
        raise RuntimeError("return_lse is not supported for nested tensors: call attention_varlen on their values and offsets.")
    query, key, value = _packed(query, "query"), _packed(key, "key"), _packed(value, "value")
    options["causal"] = "top_left" if options["causal"] is True else options["causal"]
    offsets_q, offsets_k = query.offsets(), key.offsets()  # type: ignore[attr-defined]
    longest_q, longest_k = query._get_max_seqlen(), key._get_max_seqlen()  # type: ignore[attr-defined]
    out = varlen(
        query.values(), key.values(), value.values(), offsets_q.to(torch.int32), offsets_k.to(torch.int32), longest_q, longest_k, **options
    )  # fmt: skip
    return torch.nested.nested_tensor_from_jagged(out, offsets_q, max_seqlen=longest_q).transpose(1, 2)
