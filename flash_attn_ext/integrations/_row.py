"""Attention of one row of a batch that may hold several sequences, which its positions tell, for graphs of torch.compile.

How many sequences there are decides which kernel runs, and only the values of position_ids say it. Read between operators they would
break the graph in every layer; here operators read them, once per forward pass (the calls of later layers are the same and merge).
"""

from typing import Any

import torch
from torch import Tensor


def later_starts(position_ids: Tensor) -> Tensor:
    """[1, L] -> where sequences but the first start: a position there does not follow the one before."""
    return (position_ids[0].diff() != 1).nonzero().flatten() + 1


@torch.library.custom_op("flash_attn_ext::sequence_ends", mutates_args=())
def sequence_ends(position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """[1, L] -> ends [L + 1] int32: 0, the end of every sequence, and L up to the last place; on the CPU: how many there are, and
    the length of the longest."""
    rows = position_ids.shape[1]
    starts = later_starts(position_ids)
    ends = position_ids.new_full((rows + 1,), rows, dtype=torch.int32)
    ends[0] = 0
    ends[1 : starts.numel() + 1] = starts
    longest = int(ends.diff().max()) if starts.numel() > 0 else rows
    return ends, torch.tensor([starts.numel() + 1, longest])


@sequence_ends.register_fake
def _(position_ids: Tensor) -> tuple[Tensor, Tensor]:
    ends = position_ids.new_empty((position_ids.shape[1] + 1,), dtype=torch.int32)
    return ends, torch.empty(2, dtype=torch.int64)


def _options(left: int | None, scale: float | None, softcap: float, dropout_p: float) -> dict[str, Any]:
    return {
        "window_left": left, "window_right": 0, "bottom_right": True, "scale": scale, "softcap": softcap, "dropout_p": dropout_p,
    }  # fmt: skip


def _packed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[1, H, L, D] -> [L, H, D], views."""
    return tuple(tensor[0].transpose(0, 1) for tensor in tensors)


@torch.library.custom_op("flash_attn_ext::attention_of_row", mutates_args=())
def attention_of_row(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, counts: Tensor, sinks: Tensor | None, seed: Tensor | None,
    left: int | None, scale: float | None, softcap: float, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal attention of [1, H, L, D] inside the sequences of sequence_ends: out [1, H, L, D] and lse [1, H, L]."""
    options = _options(left, scale, softcap, dropout_p)
    sequences, longest = counts.tolist()
    if sequences == 1:
        out, lse = torch.ops.flash.attention_forward(query, key, value, None, None, sinks, seed, **options)
        return out, lse
    cu_seqlens = ends[: sequences + 1]
    out, lse = torch.ops.flash.attention_varlen_forward(
        *_packed(query, key, value), cu_seqlens, cu_seqlens, longest, longest, None, sinks, seed, **options
    )
    return out.transpose(0, 1)[None], lse[None]


@attention_of_row.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, counts: Tensor, sinks: Tensor | None, seed: Tensor | None,
    left: int | None, scale: float | None, softcap: float, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    options = _options(left, scale, softcap, dropout_p)
    out, lse = torch.ops.flash.attention_forward(query, key, value, None, None, sinks, seed, **options)
    return out, lse


@torch.library.custom_op("flash_attn_ext::attention_of_row_backward", mutates_args=())
def _attention_of_row_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, ends: Tensor, counts: Tensor,
    grad_lse: Tensor | None, sinks: Tensor | None, seed: Tensor | None, left: int | None, scale: float | None, softcap: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The last result is empty where there are no sinks."""
    options = _options(left, scale, softcap, dropout_p)
    sequences, longest = counts.tolist()
    if sequences == 1:
        dquery, dkey, dvalue, _, dsinks = torch.ops.flash.attention_backward(
            grad_out, grad_lse, query, key, value, out, lse, None, None, sinks, seed, [True, True, True, False, sinks is not None],
            **options,
        )  # fmt: skip
    else:
        cu_seqlens = ends[: sequences + 1]
        grad_out, query, key, value, out = _packed(grad_out, query, key, value, out)
        dquery, dkey, dvalue, dsinks = torch.ops.flash.attention_varlen_backward(
            grad_out, None if grad_lse is None else grad_lse[0], query, key, value, out, lse[0], cu_seqlens, cu_seqlens, longest, longest, None, sinks, seed,
            [True, True, True, sinks is not None], **options,
        )  # fmt: skip
        dquery, dkey, dvalue = (gradient.transpose(0, 1)[None] for gradient in (dquery, dkey, dvalue))
    return dquery, dkey, dvalue, query.new_empty(0) if dsinks is None else dsinks


@_attention_of_row_backward.register_fake
def _(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, ends: Tensor, counts: Tensor,
    grad_lse: Tensor | None, sinks: Tensor | None, seed: Tensor | None, left: int | None, scale: float | None, softcap: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dquery, dkey, dvalue, _, dsinks = torch.ops.flash.attention_backward(
        grad_out, grad_lse, query, key, value, out, lse, None, None, sinks, seed, [True, True, True, False, sinks is not None],
        **_options(left, scale, softcap, dropout_p),
    )  # fmt: skip
    return dquery, dkey, dvalue, query.new_empty(0) if dsinks is None else dsinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, ends, counts, sinks, seed, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output, ends, counts, sinks, seed)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, out, lse, ends, counts, sinks, seed = ctx.saved_tensors
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    *gradients, dsinks = _attention_of_row_backward(
        grad_out, query, key, value, out, lse, ends, counts, grad_lse, sinks, seed, *ctx.options
    )
    return *gradients, None, None, None if sinks is None else dsinks, *[None] * 5


attention_of_row.register_autograd(_backward, setup_context=_save)
