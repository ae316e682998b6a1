"""From what a caller writes to what attention_forward takes: four dimensions, one window, one alignment, a seed."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

Causal = bool | str
Window = tuple[int | None, int | None]


class Interval(NamedTuple):
    """Row i sees keys [i + d - left, i + d + right], d = S - L if bottom_right else 0; None is an open end."""

    left: int | None
    right: int | None
    bottom_right: bool

    def given(self, bottom_right: bool) -> dict[str, Any]:
        """As the function given() does; bottom_right: the operator's default."""
        result: dict[str, Any] = {}
        if self.left is not None:
            result["window_left"] = self.left
        if self.right is not None:
            result["window_right"] = self.right
        if self.bottom_right is not bottom_right:
            result["bottom_right"] = self.bottom_right
        return result


def interval(causal: Causal, window: Window | None, *, bottom_right: bool) -> Interval:
    """bottom_right: the alignment that causal=True, or no causal at all, means to this caller."""
    if causal not in (False, True, "top_left", "bottom_right"):
        raise ValueError(f'causal must be False, True, "top_left" or "bottom_right", but got {causal!r}.')
    left, right = _ends(window)
    if isinstance(causal, str):
        bottom_right = causal == "bottom_right"
    return Interval(left, 0 if causal else right, bottom_right)


def given(scale: float | None, softcap: float, dropout_p: float = 0.0, deterministic: bool | None = None) -> dict[str, Any]:
    """Those that are not an operator's defaults, by name: every argument that it gets costs the host half a microsecond."""
    result: dict[str, Any] = {}
    if scale is not None:
        result["scale"] = scale
    if softcap != 0.0:
        result["softcap"] = softcap
    if dropout_p != 0.0:
        result["dropout_p"] = dropout_p
    if deterministic is not None:
        result["deterministic"] = deterministic
    return result


def _ends(window: Window | None) -> Window:
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(
            f"window must be None or a pair (left, right) of numbers of keys, None for an open end, but got {window!r}."
        )
    for end in window:
        if isinstance(end, (bool, float, str)):
            raise TypeError(f"window ends must be integers or None, but got {window!r}.")
        if isinstance(end, int) and end < 0:
            raise ValueError(f"window ends must be at least 0, or None for an open end, but got {window!r}.")
    return window[0], window[1]


def unwrap_causal_bias(attn_mask: Tensor | None, causal: Causal, query: Tensor, key: Tensor) -> tuple[Tensor | None, Causal]:
    """torch.nn.attention.bias.CausalBias is a causal alignment in the guise of a mask; it answers to no operator but SDPA.

    Known by its attribute: importing its module for an isinstance takes more than a second.
    """
    variant = getattr(attn_mask, "variant", None)
    if attn_mask is None or variant is None:
        return attn_mask, causal
    if causal:
        raise ValueError("CausalBias should not be used with causal=True")
    sizes = (attn_mask.seq_len_q, attn_mask.seq_len_kv)  # type: ignore[attr-defined]
    lengths = (*query.shape[-2:-1], *key.shape[-2:-1])
    if sizes != lengths:
        raise ValueError(f"CausalBias was made for lengths (L, S) = {sizes}, but query and key have {lengths}.")
    return None, "top_left" if variant.name == "UPPER_LEFT" else "bottom_right"


class Folded(NamedTuple):
    query: Tensor  # [B, H, L, E]
    key: Tensor  # [B, Hk, S, E]
    value: Tensor  # [B, Hk, S, Ev]
    attn_mask: Tensor | None  # [1 or B, 1 or H, 1 or L, 1 or S]
    alibi_slopes: Tensor | None  # [H] or [B, H]
    sinks: Tensor | None  # [H]
    batch: tuple[int, ...]  # what B stands for
    rank: int  # of the caller's result

    def unfold(self, result: Tensor) -> Tensor:
        """[B, H, ...] -> the caller's [..., H, ...]."""
        if self.rank > 4:
            return result.unflatten(0, self.batch)
        for _ in range(4 - self.rank):
            result = result[0]
        return result


def fold(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, alibi_slopes: Tensor | None, sinks: Tensor | None,
    enable_gqa: bool,
) -> Folded:  # fmt: skip
    """Any rank from 2 on, batch dimensions (and heads, unless grouped) broadcast as in torch.matmul. Views where possible."""
    query, key, value, attn_mask = autocast(query, key, value, attn_mask)
    if attn_mask is None and alibi_slopes is None and query.dim() == 4 == key.dim() == value.dim():
        (sequences, heads, *_), of_key, of_value = query.shape, key.shape, value.shape
        grouped = enable_gqa and heads != 1 and of_key[1] != 0 and heads % of_key[1] == 0
        if of_key[:2] == of_value[:2] and sequences == of_key[0] and (heads == of_key[1] or grouped):
            # Most calls: nothing broadcasts, which takes tens of microseconds of the host to find out below.
            return Folded(query, key, value, None, None, accumulated(sinks, query), (sequences,), 4)
    ranks = (query.dim(), key.dim(), value.dim())
    rank = max(ranks)
    if min(ranks) < 2:
        # Two spaces as in SDPA's own text, which callers match.
        raise RuntimeError(
            "Expected query, key, and value to all be  at least 2 dimensional, but got query.dim: "
            f"{ranks[0]} key.dim: {ranks[1]} and value.dim: {ranks[2]} instead."
        )
    if rank != 4 or min(ranks) != 4:
        width = max(rank, 4)
        query, key, value = _widen(query, width), _widen(key, width), _widen(value, width)
    key, value = _match_heads(query, key, value, enable_gqa)
    if query.shape[-3] == 1:
        query = query.expand(*query.shape[:-3], key.shape[-3], -1, -1)
    heads, rows, keys = query.shape[-3], query.shape[-2], key.shape[-2]
    batch = query.shape[:-3]
    if key.shape[:-3] != batch or value.shape[:-3] != batch:
        batch = _broadcast_batch(query, key, value)
    if attn_mask is not None:
        attn_mask = _fold_mask(attn_mask, batch, (heads, rows, keys))
    if alibi_slopes is not None and alibi_slopes.dim() > 1:
        _check_broadcast("alibi_slopes", alibi_slopes, "[..., H]", (*batch, heads))
        alibi_slopes = alibi_slopes.expand(*batch, heads).reshape(-1, heads)
    alibi_slopes, sinks = accumulated(alibi_slopes, query), accumulated(sinks, query)
    query, key, value = _flatten(query, batch), _flatten(key, batch), _flatten(value, batch)
    return Folded(query, key, value, attn_mask, alibi_slopes, sinks, tuple(batch), rank)


def autocast(query: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """What autocast does to torch.ops.flash.attention; the inner operators keep the dtypes that they get."""
    tensors, device = (query, *others), query.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):  # it raises for devices without autocast
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        tensor.to(dtype) if tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
        for tensor in tensors
    )


def accumulate_type(query: Tensor) -> torch.dtype:
    """Of lse, slopes and sinks."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def accumulated(tensor: Tensor | None, query: Tensor) -> Tensor | None:
    return None if tensor is None else tensor.to(accumulate_type(query))


def _widen(tensor: Tensor, rank: int) -> Tensor:
    return tensor[(None,) * (rank - tensor.dim())] if tensor.dim() < rank else tensor


def _match_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor]:
    """Key and value with one number of heads that divides the number of heads of the result; one shared head stays one."""
    heads, key_heads, value_heads = query.shape[-3], key.shape[-3], value.shape[-3]
    kv_heads = key_heads if value_heads == 1 else value_heads
    grouped = enable_gqa and heads != 1 and kv_heads != 0
    if heads == key_heads == value_heads:
        return key, value
    if {key_heads, value_heads} - {1, kv_heads} or (heads % kv_heads != 0 if grouped else len({1, heads, kv_heads}) > 2):
        rule = (
            "must be equal and divide those of query"
            if enable_gqa
            else "must be 1 or those of query (else pass enable_gqa=True)"
        )
        raise RuntimeError(f"heads of key ({key_heads}) and value ({value_heads}) {rule} ({heads}).")
    return (
        key if key_heads == kv_heads else key.expand(*key.shape[:-3], kv_heads, -1, -1),
        value if value_heads == kv_heads else value.expand(*value.shape[:-3], kv_heads, -1, -1),
    )


def _broadcast_batch(query: Tensor, key: Tensor, value: Tensor) -> torch.Size:
    try:
        return torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])  # tens of microseconds
    except RuntimeError as error:
        sizes = ", ".join(str(list(tensor.shape)) for tensor in (query, key, value))
        raise RuntimeError(f"query, key and value have the sizes {sizes}: batch dimensions must be equal or 1.") from error


def _check_broadcast(name: str, tensor: Tensor, shape: str, full: tuple[int, ...]) -> None:
    fits = zip(reversed(tensor.shape), reversed(full), strict=False)
    # By two comparisons: of `size in (1, wanted)` torch 2.11's compile makes False where only one of the sizes is symbolic.
    if tensor.dim() > len(full) or any(size != 1 and size != wanted for size, wanted in fits):
        raise RuntimeError(
            f"{name} of shape {list(tensor.shape)} does not broadcast to {shape} = {list(full)}; "
            "each of its dimensions must be 1 or that size."
        )


def _flatten(tensor: Tensor, batch: tuple[int, ...]) -> Tensor:
    """[..., x, y, z] -> [B, x, y, z], copied only where the batch dimensions do not merge by strides."""
    if tensor.shape[:-3] != batch:
        tensor = tensor.expand(*batch, *tensor.shape[-3:])
    return tensor if tensor.dim() == 4 else tensor.reshape(math.prod(batch), *tensor.shape[-3:])


def _fold_mask(attn_mask: Tensor, batch: tuple[int, ...], full: tuple[int, int, int]) -> Tensor:
    _check_broadcast("attn_mask", attn_mask, "[..., H, L, S]", (*batch, *full))
    attn_mask = _widen(attn_mask, len(batch) + 3)
    if all(size == 1 for size in attn_mask.shape[:-3]):
        return attn_mask.reshape(1, *attn_mask.shape[-3:])
    return _flatten(attn_mask, batch)


def draw_seed(query: Tensor, dropout_p: float) -> Tensor | None:
    """Two doubles, read as 128 random bits. By rand_like: torch.compile neither recomputes nor merges it, randint it does."""
    return torch.rand_like(query.new_empty(2, dtype=torch.float64)) if dropout_p > 0.0 else None
