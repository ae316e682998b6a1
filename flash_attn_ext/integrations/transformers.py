"""Hugging Face transformers on these kernels:

    import flash_attn_ext.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flash_attn_ext")

Causal and bidirectional models, grouped heads, sliding windows, softcap, sinks, dropout; batches padded on either side, packed
sequences, generate() with any cache, on the CPU and CUDA. Rows of padding come out as zeros.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers.masking_utils import flash_attention_mask, sdpa_mask

from .. import functional
from .._arguments import accumulated, draw_seed
from . import _row

NAME = "flash_attn_ext"
FEW_ROWS = 16  # up to here padding is masked; from here on it is cut out, which costs a copy and reading the lengths


class _Packing(NamedTuple):
    """Which tokens of a padded or packed batch there are, and in which sequences."""

    indices: Tensor | None  # of the tokens in the flattened batch; None: all
    cu_seqlens: Tensor
    longest: int


class _Last:
    """What the layers of one forward pass share: computed for a tensor once, since it makes the host wait for the device."""

    def __init__(self) -> None:
        self.of: weakref.ref[Tensor] | None = None
        self.version = -1
        self.result: _Packing | None = None

    def knows(self, tensor: Tensor) -> bool:
        if torch.compiler.is_compiling() or tensor.is_inference():
            return False
        return self.of is not None and self.of() is tensor and self.version == tensor._version

    def get(self, tensor: Tensor, compute: Any) -> _Packing | None:
        if self.knows(tensor):
            return self.result
        result: _Packing | None = compute(tensor)
        if not (torch.compiler.is_compiling() or tensor.is_inference()):
            self.result, self.of, self.version = result, weakref.ref(tensor), tensor._version
        return result


_last_mask, _last_positions = _Last(), _Last()


def _of_lengths(lengths: Tensor, indices: Tensor | None) -> _Packing:
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return _Packing(indices, cu_seqlens, int(lengths.max()))


def _unpadded(mask: Tensor) -> _Packing:
    """mask [B, S], nonzero = a token."""
    kept = mask.bool()
    return _of_lengths(kept.sum(1), kept.flatten().nonzero().flatten())


def _kept_first(mask: Tensor) -> _Packing:
    """The same without reading anything, for graphs: all places, those of tokens first, where the sequences end before the rest."""
    kept = mask.bool()
    cu_seqlens = torch.nn.functional.pad(kept.sum(1).cumsum(0, dtype=torch.int32), (1, 0))
    return _Packing(kept.flatten().logical_not().argsort(stable=True), cu_seqlens, mask.shape[1])


def _restarts(position_ids: Tensor) -> _Packing | None:
    """Sequences in a row, position_ids [1, L]."""
    starts = _row.later_starts(position_ids)
    if starts.numel() == 0:
        return None
    ends = torch.cat([starts, starts.new_tensor([position_ids.shape[1]])])
    return _of_lengths(ends.diff(prepend=ends.new_zeros(1)), None)


def _may_be_packed(position_ids: Tensor, query: Tensor, key: Tensor) -> bool:
    """Whether one row of a batch may hold several sequences, as far as sizes tell."""
    batch, _, rows, _ = query.shape
    return bool(batch == 1 and rows != 1 and rows == key.shape[2] and position_ids.dim() == 2)


def _packed_by(position_ids: Tensor, query: Tensor, key: Tensor) -> _Packing | None:
    """The sequences that one row of a batch holds, by its positions; None if it is one sequence."""
    if _last_positions.result is None and _last_positions.knows(position_ids):
        return None  # all layers but the first
    return _last_positions.get(position_ids, _restarts) if _may_be_packed(position_ids, query, key) else None


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    is_causal: bool | None = None, s_aux: Tensor | None = None, position_ids: Tensor | None = None, **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """An attention function of transformers' AttentionInterface: [B, H, L, D] -> ([B, L, H, D], None).

    attention_mask: None, [B, S] with nonzero = a token, or [B, 1 or H, L, S] as attention() takes it, causal part and window
    included.
    """
    lengths_or_pages = False
    if more:
        if more.get("position_bias") is not None:
            raise NotImplementedError(
                'attn_implementation="flash_attn_ext" does not support position_bias: use "sdpa" or "eager".'
            )
        lengths_or_pages = more.get("cu_seq_lens_q") is not None or more.get("block_table") is not None
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    dtype = value.dtype
    if query.dtype != dtype or key.dtype != dtype:  # layer norms kept in fp32, as adapters do it
        query, key = query.to(dtype), key.to(dtype)
    window = None if sliding_window is None else (sliding_window - 1, sliding_window - 1)
    packing = None
    if attention_mask is None and not lengths_or_pages:
        if position_ids is not None and causal:
            if torch.compiler.is_compiling():
                if _may_be_packed(position_ids, query, key):
                    out, _ = _row.attention_of_row(
                        query, key, value, *_row.sequence_ends(position_ids), accumulated(s_aux, query),
                        draw_seed(query, dropout), window and window[0], scaling, softcap or 0.0, dropout,
                    )  # fmt: skip
                    return out.transpose(1, 2), None
            else:
                packing = _packed_by(position_ids, query, key)
        if packing is None and dropout == 0.0 and s_aux is None:  # the common case, worth some microseconds of the host
            left, right = window or (None, None)
            return torch.ops.flash.attention_rows_first(
                query, key, value, left, 0 if causal else right, causal, scaling, softcap or 0.0, True
            )[0], None  # fmt: skip
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux, "window": window}
    if more.get("block_table") is not None and more.get("k_cache") is not None:
        return _paged(query, key, value, causal, options, **more), None
    options["dropout_p"] = dropout
    if packing is not None:
        return _varlen(query, key, value, packing, causal, options), None
    rows = query.shape[2]
    if attention_mask is not None and attention_mask.dim() == 4:
        options["window"] = None
        return functional.attention(query, key, value, attention_mask, **options).transpose(1, 2), None
    if attention_mask is not None:
        seen = attention_mask.shape[1]
        if seen < key.shape[2]:  # a static cache, filled so far
            key, value = key[:, :, :seen], value[:, :, :seen]
        if rows > FEW_ROWS and rows == seen:
            compiling = torch.compiler.is_compiling()
            packing = _kept_first(attention_mask) if compiling else _last_mask.get(attention_mask, _unpadded)
            assert packing is not None
            return _varlen(query, key, value, packing, causal, options), None
        mask = attention_mask[:, None, None].bool()
        return functional.attention(query, key, value, mask, causal=causal and "bottom_right", **options).transpose(1, 2), None

    ends = [more.get("cu_seq_lens_q"), more.get("cu_seq_lens_k")]
    longest = [more.get(f"max_length_{which}", more.get(f"max_seqlen_{which}")) for which in "qk"]
    if None not in longest and all(isinstance(x, Tensor) for x in ends):
        query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        cu_seqlens = [x.to(torch.int32) for x in ends if x is not None]
        most = [int(x) for x in longest if x is not None]
        out = functional.attention_varlen(query, key, value, *cu_seqlens, *most, causal=causal, **options)
        return out.unflatten(0, (-1, rows)), None
    return functional.attention(query, key, value, causal=causal and "bottom_right", **options).transpose(1, 2), None


# Functions of transformers.masking_utils whose masks attention() makes by itself, from what the model hands it.
_EXPRESSED = {
    "causal_mask_function", "bidirectional_mask_function", "and_masks", "sliding_window_overlay",
    "sliding_window_bidirectional_overlay", "packed_sequence_mask_function", "remap_positions_for_packed_sequence",
}  # fmt: skip


def _made_of(mask_function: Callable[..., Any]) -> Iterator[str]:
    """Names of the functions that a mask is put together from; under torch.compile, to which closures are opaque, the outermost."""
    yield getattr(mask_function, "__qualname__", "").split(".")[0]
    if torch.compiler.is_compiling():
        return
    for cell in getattr(mask_function, "__closure__", None) or ():
        held = cell.cell_contents
        for part in held if isinstance(held, tuple) else (held,):
            if callable(part):
                yield from _made_of(part)


def mask(*, batch_size: int, mask_function: Callable[..., Any], use_vmap: bool = False, **arguments: Any) -> Tensor | None:
    """A mask function of transformers' AttentionMaskInterface: as for flash attention, which gets the padding alone; of four dimensions
    where that does not say all, as with images whose tokens see each other both ways, or sequences packed in several rows."""
    names = set(_made_of(mask_function))
    packed_rows = batch_size > 1 and "packed_sequence_mask_function" in names
    if use_vmap or packed_rows or not names <= _EXPRESSED:
        arguments |= {"use_vmap": use_vmap, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(batch_size=batch_size, mask_function=mask_function, **arguments)
    return flash_attention_mask(batch_size=batch_size, mask_function=mask_function, **arguments)


def _varlen(query: Tensor, key: Tensor, value: Tensor, packing: _Packing, causal: bool, options: dict[str, Any]) -> Tensor:
    batch, _, rows, _ = query.shape
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if packing.indices is not None:
        query, key, value = (x.index_select(0, packing.indices) for x in (query, key, value))
    cu_seqlens, longest = packing.cu_seqlens, packing.longest
    out: Tensor = functional.attention_varlen(
        query, key, value, cu_seqlens, cu_seqlens, longest, longest, causal=causal, **options
    )
    if packing.indices is not None:
        out = out.new_zeros(batch * rows, *out.shape[1:]).index_copy(0, packing.indices, out)
    return out.unflatten(0, (batch, rows))


def _paged(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, options: dict[str, Any], *, k_cache: Tensor, v_cache: Tensor,
    block_table: Tensor, cu_seq_lens_k: Tensor, **more: Any,
) -> Tensor:  # fmt: skip
    """A step of continuous batching: one row of each sequence, [1, H, B, D], over pages [pages, page size, Hk, D]."""
    query, key, value = (x.transpose(0, 2) for x in (query, key, value))
    count = query.shape[0]
    out = functional.attention_decode(
        query, k_cache.transpose(1, 2), v_cache.transpose(1, 2), (cu_seq_lens_k.diff()[:count] - 1).to(torch.int32),
        block_table=block_table[:count], k_new=key, v_new=value, causal=causal, **options,
    )  # fmt: skip
    return out.permute(2, 0, 1, 3)


def register() -> None:
    """Makes the name known to transformers; importing this module does it."""
    transformers.AttentionInterface.register(NAME, attention)
    transformers.AttentionMaskInterface.register(NAME, mask)
    # Names with "flash" in them are otherwise looked for among installed packages and kernels of the hub.
    check = getattr(transformers.PreTrainedModel, "_check_and_adjust_attn_implementation", None)
    if check is None or hasattr(check, "before_flash_attn_ext"):
        return

    def check_others(self: Any, attn_implementation: str | None, *arguments: Any, **options: Any) -> str:
        return NAME if attn_implementation == NAME else check(self, attn_implementation, *arguments, **options)

    check_others.before_flash_attn_ext = check  # type: ignore[attr-defined]
    transformers.PreTrainedModel._check_and_adjust_attn_implementation = check_others  # type: ignore[method-assign, unused-ignore]


register()
