"""flash_attn.bert_padding: between padded [batch, length, ...] and packed [total, ...] tensors. Differentiable by torch's own indexing."""

import torch
from torch import Tensor
from torch.nn import functional


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """[n, ...] -> [len(indices), ...]."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """[len(indices), ...] -> [first_axis_dim, ...], zeros elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """index_first_axis, and the input itself for what comes after."""
    return index_first_axis(input, indices), input


def _packed(hidden_states: Tensor, kept: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() > 0 else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Drops padding.

    Args:
        hidden_states: [batch, length, ...].
        attention_mask: [batch, length], bool or integer, 1 = a token.
        unused_mask: [batch, length], 1 = a place that is kept in the result but belongs to no token.

    Returns:
        hidden_states [total, ...], indices [total] into the flattened input, cu_seqlens [batch + 1] int32, the greatest length
        (read from the device), and the number of tokens of each sequence [batch].
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    return (*_packed(hidden_states, kept, lengths), used)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The same where several short sequences stand in a row: its nonzero entries in attention_mask_in_length [batch, length] are
    their lengths."""
    total = attention_mask_in_length.sum(-1, keepdim=True)
    kept = torch.arange(attention_mask_in_length.shape[-1], device=total.device) < total
    flat = attention_mask_in_length.flatten()
    return _packed(hidden_states, kept, flat[flat.nonzero().flatten()])


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """[total, ...] -> [batch, seqlen, ...], zeros where there is no token."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
