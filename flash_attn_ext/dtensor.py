"""Sharding rules for torch.distributed.tensor: dense attention runs replicated, sharded over the batch, or over the heads.

A sharded sequence would need an exchange of keys (ring attention): DTensor gathers it first. With dropout every shard draws its
mask by its own coordinates from the same seed, so that shards drop alike, and otherwise than the unsharded call.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

Rule = tuple[list[Placement | None], list[Placement | None]]  # (outputs, inputs), None where there is no tensor


def _along(tensor: Any, dim: int | None) -> Placement | None:
    """How a [B, H, ...] argument lies when the call is split along dim (None: not split). Broadcast dimensions stay whole."""
    if tensor is None:
        return None
    return Replicate() if dim is None or tensor.shape[dim] == 1 else Shard(dim)


def _per_head(tensor: Any, dim: int | None) -> Placement | None:
    """The same for slopes [H] or [B, H] and sinks [H]."""
    if tensor is None:
        return None
    own = None if dim is None else dim - (2 - len(tensor.shape))
    return Replicate() if own is None or own < 0 else Shard(own)


def _splits(query: Any, key: Any) -> Iterator[int | None]:
    """None: whole. 0: over the batch. 1: over the heads, if every shard then holds whole groups of query and kv heads."""
    yield None
    yield 0
    heads, kv_heads = query.shape[1], key.shape[1]
    sizes = query.mesh.shape
    # A head dimension may be split along several mesh dimensions at once, as long as no shard is empty.
    ways = {math.prod(subset) for count in range(1, len(sizes) + 1) for subset in itertools.combinations(sizes, count)}
    if heads == kv_heads or all(kv_heads % way == 0 for way in ways if way <= kv_heads):
        yield 1


def _inputs(dim: int | None, query: Any, key: Any, value: Any, *extra: Any) -> list[Placement | None]:
    """query, key, value, then attn_mask, alibi_slopes, sinks, seed as far as the caller passed them."""
    attn_mask, alibi_slopes, sinks, seed = (*extra, None, None, None, None)[:4]
    whole_seed = None if seed is None else Replicate()
    optional = [_along(attn_mask, dim), _per_head(alibi_slopes, dim), _per_head(sinks, dim), whole_seed]
    return [_along(query, dim), _along(key, dim), _along(value, dim), *optional[: len(extra)]]


@register_sharding(torch.ops.flash.attention_forward.default)
def forward(query: Any, key: Any, value: Any, *extra: Any, **options: Any) -> list[Rule]:
    return [
        ([_along(query, dim), _along(query, dim)], _inputs(dim, query, key, value, *extra) + [None] * len(options))
        for dim in _splits(query, key)
    ]


@register_sharding(torch.ops.flash.attention_backward.default)
def backward(
    grad_out: Any, grad_lse: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, attn_mask: Any, alibi_slopes: Any,
    sinks: Any, seed: Any, output_mask: list[bool], **options: Any,
) -> list[Rule]:  # fmt: skip
    rules: list[Rule] = []
    for dim in _splits(query, key):
        inputs = _inputs(dim, query, key, value, attn_mask, alibi_slopes, sinks, seed)
        like_query = _along(query, dim)
        # A gradient that sums over the split dimension would be partial: such a split is left out.
        if dim is not None and any(
            wanted and placement == Replicate()
            for wanted, placement in zip(output_mask[3:], (inputs[3], inputs[5]), strict=True)
        ):
            continue
        gradients = [inputs[0], inputs[1], inputs[2], inputs[3], inputs[5]]
        outputs = [placement if wanted else None for wanted, placement in zip(output_mask, gradients, strict=True)]
        grads = [like_query, None if grad_lse is None else like_query]
        rules.append((outputs, grads + inputs[:3] + [like_query, like_query] + inputs[3:] + [None] * (1 + len(options))))
    return rules


def _distinguish(operator: Any, first: int) -> None:
    """DTensor caches what a rule answered by the tensors among the arguments, but not by where there is None and not by the output
    mask, unless told from which argument on those count; register_sharding cannot be told."""
    known = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    known[operator] = dataclasses.replace(known[operator], static_argnum=first)


_distinguish(torch.ops.flash.attention_forward.default, 3)  # from attn_mask on
_distinguish(torch.ops.flash.attention_backward.default, 1)  # from grad_lse on
