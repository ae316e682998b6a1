"""torch's own SDPA on these kernels: overrides of the four operators of its flash backend, through torch's public registry.

What those operators cannot pass on (dropout, whose random state is torch's own; fp8 scales; used lengths; pages) still runs torch's
kernels. At this level is_causal is aligned to the bottom right, lse is natural and fp32, and backward may be given the out and lse of
a whole ring (torch's context parallel does).
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

NAME = "flash_attn_ext"

_HEAD = "query, key, value"
_FORWARD = f"{_HEAD}, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale, window_size_left, "
# Arguments of the operators, as torch 2.11 to 2.13 have them; in brackets those that not every release has.
_KNOWN = {
    "_scaled_dot_product_flash_attention": (f"{_HEAD}, dropout_p, is_causal, return_debug_mask, scale", 9),
    "_scaled_dot_product_flash_attention_backward": (
        f"grad_out, {_HEAD}, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed, "
        "philox_offset, scale",
        3,
    ),
    "_flash_attention_forward": (f"{_FORWARD}window_size_right, seqused_k, alibi_slopes, [block_table], [num_splits]", 5),
    "_flash_attention_backward": (
        f"grad_out, {_HEAD}, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state, unused, "
        "scale, window_size_left, window_size_right",
        3,
    ),
}

Kernel = Callable[..., Any]
_originals: dict[str, Kernel | None] = {}  # torch's own kernels, found before they are overridden


def unknown_schema(name: str, schema: torch.FunctionSchema) -> str:
    """What is wrong with the schema of an operator; '' if it is one of those that are known."""
    arguments, returns = _KNOWN[name]
    known = [argument.strip("[]") for argument in arguments.split(", ")]
    needed = [argument for argument in arguments.split(", ") if not argument.startswith("[")]
    found = [argument.name for argument in schema.arguments]
    if set(found) - set(known):
        return f"it has the unknown arguments {sorted(set(found) - set(known))}"
    if set(needed) - set(found):
        return f"it lacks the arguments {sorted(set(needed) - set(found))}"
    if len(schema.returns) != returns:
        return f"it returns {len(schema.returns)} values instead of {returns}"
    return ""


def _original(name: str, keyset: Any, *arguments: Any, **options: Any) -> Any:
    kernel = _originals.get(name)
    if kernel is None:
        raise NotImplementedError(f"aten::{name} has no other kernel here, and flash_attn_ext does not take this call.")
    return kernel(keyset, *arguments, **options)


def _takes(query: Tensor, value: Tensor, dropout_p: float) -> bool:
    return dropout_p == 0.0 and query.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _window(is_causal: bool, left: int | None, right: int | None) -> dict[str, Any]:
    left, right = (None if end is None or end < 0 else end for end in (left, right))
    return {"window_left": left, "window_right": 0 if is_causal else right, "bottom_right": True}


def _states(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rng_state, unused and debug_attn_mask of a call without dropout, which nobody reads: not filled, that would be two launches."""
    return query.new_empty(2, dtype=torch.uint64), query.new_empty((), dtype=torch.uint64), query.new_empty(0)


def _sdpa_forward(
    keyset: Any, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    if not _takes(query, value, dropout_p) or return_debug_mask:
        return _original(
            "_scaled_dot_product_flash_attention",
            keyset,
            query,
            key,
            value,
            dropout_p,
            is_causal,
            return_debug_mask,
            scale=scale,
        )
    out, lse = torch.ops.flash.attention_forward(query, key, value, scale=scale, **_window(is_causal, None, None))
    return out, lse, None, None, query.shape[2], key.shape[2], *_states(query)


def _sdpa_backward(
    keyset: Any, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    philox_seed: Tensor, philox_offset: Tensor, *, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if not _takes(query, value, dropout_p):
        return _original(
            "_scaled_dot_product_flash_attention_backward", keyset, grad_out, query, key, value, out, logsumexp, cum_seq_q,
            cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset, scale=scale,
        )  # fmt: skip
    return torch.ops.flash.attention_backward(
        grad_out, None, query, key, value, out, logsumexp, None, None, None, None, [True, True, True, False, False],
        scale=scale, **_window(is_causal, None, None),
    )[:3]  # fmt: skip


def _forward(
    keyset: Any, query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, alibi_slopes: Tensor | None = None,
    num_splits: int | None = None, **more: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Dense [B, L, H, D], or packed [total, H, D] with cum_seq_q and cum_seq_k."""
    refused = any(value is not None for value in more.values())  # seqused_k, block_table
    if not _takes(query, value, dropout_p) or return_debug_mask or refused:
        options = {"window_size_left": window_size_left, "window_size_right": window_size_right, "alibi_slopes": alibi_slopes}
        options |= more if num_splits is None else {**more, "num_splits": num_splits}
        return _original(
            "_flash_attention_forward", keyset, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
            return_debug_mask, scale=scale, **options,
        )  # fmt: skip
    window = _window(is_causal, window_size_left, window_size_right)
    if cum_seq_q is None:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out, lse = torch.ops.flash.attention_forward(q, k, v, None, alibi_slopes, scale=scale, **window)
        out = out.transpose(1, 2)
    else:
        out, lse = torch.ops.flash.attention_varlen_forward(
            query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, alibi_slopes, scale=scale, **window
        )
    return out, lse, *_states(query)


def _backward(
    keyset: Any, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    rng_state: Tensor, unused: Tensor, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    if not _takes(query, value, dropout_p):
        return _original(
            "_flash_attention_backward", keyset, grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q,
            max_k, dropout_p, is_causal, rng_state, unused, scale=scale, window_size_left=window_size_left,
            window_size_right=window_size_right,
        )  # fmt: skip
    window = _window(is_causal, window_size_left, window_size_right)
    if cum_seq_q is None or cum_seq_q.numel() == 0:
        dense = (x.transpose(1, 2) for x in (query, key, value, out))
        gradients = torch.ops.flash.attention_backward(
            grad_out.transpose(1, 2), None, *dense, logsumexp, None, None, None, None, [True, True, True, False, False],
            scale=scale, **window,
        )  # fmt: skip
        return tuple(gradient.transpose(1, 2) for gradient in gradients[:3])
    return torch.ops.flash.attention_varlen_backward(
        grad_out, None, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, None, None, None,
        [True, True, True, False], scale=scale, **window,
    )[:3]  # fmt: skip


_KERNELS: dict[str, Kernel] = {
    "_scaled_dot_product_flash_attention": _sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
    "_flash_attention_forward": _forward,
    "_flash_attention_backward": _backward,
}


class Overrides:
    """The overrides of one dispatch key, in force until remove()."""

    def __init__(self, key: str = "CUDA"):
        for name in _KERNELS:
            if wrong := unknown_schema(name, getattr(torch.ops.aten, name).default._schema):
                raise RuntimeError(
                    f"flash_attn_ext cannot take over SDPA in torch {torch.__version__}: aten::{name} is not one that it knows, "
                    f"{wrong}. torch.ops.flash.attention and flash_attn_ext.attention work all the same."
                )
        for name in _KERNELS:
            if name not in _originals:
                try:
                    _originals[name] = torch.library.get_kernel(f"aten::{name}", key).call_boxed
                except RuntimeError:  # a torch without that device
                    _originals[name] = None
        self.library: torch.library.Library | None = torch.library.Library("aten", "IMPL", key)
        with warnings.catch_warnings():  # overriding is what the caller asked for
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            for name, kernel in _KERNELS.items():
                self.library.impl(name, kernel, key, with_keyset=True)

    def remove(self) -> None:
        """The library deregisters its kernels when nobody refers to it any more."""
        self.library = None


_priority: list[int] | None = None  # as it was before prefer=True


def _prefer() -> None:
    """Puts torch's flash backend before cuDNN's, which is first on Hopper."""
    global _priority
    if torch.cuda.is_available():  # the first choice of a process settles the order
        tiny = torch.empty(1, 1, 8, 8, device="cuda", dtype=torch.float16)
        torch._fused_sdp_choice(tiny, tiny, tiny)
    order = list(torch._C._get_sdp_priority_order())
    first = int(SDPBackend.FLASH_ATTENTION.value)
    if _priority is None:
        _priority = order
    torch._C._set_sdp_priority_order([first, *(backend for backend in order if backend != first)])


def activate(*, prefer: bool = False) -> None:
    """From now on torch's flash backend is this library: F.scaled_dot_product_attention wherever torch chooses that backend, torch's
    varlen attention, nested tensors, context parallel. Dropout keeps torch's kernels.

    Args:
        prefer: also put that backend first. Without it torch chooses cuDNN for most calls on Hopper GPUs, unless
            torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION) says otherwise.

    Raises:
        RuntimeError: this torch has other operators than those that are known (2.11 to 2.13 are).
    """
    activate_flash_attention_impl(NAME)
    if prefer:
        _prefer()


def deactivate() -> None:
    """Gives torch its own kernels and order of backends back. Does nothing where activate() is not in force."""
    global _priority
    if current_flash_attention_impl() == NAME:
        restore_flash_attention_impl()
    if _priority is not None:
        torch._C._set_sdp_priority_order(_priority)
        _priority = None


@contextlib.contextmanager
def sdpa(*, prefer: bool = True) -> Iterator[None]:
    """activate() of torch's SDPA inside a `with` block; what was active before is active again after it."""
    before = current_flash_attention_impl()
    activate(prefer=prefer)
    try:
        yield
    finally:
        deactivate()
        if before is not None:
            activate_flash_attention_impl(before)


register_flash_attention_impl(NAME, register_fn=Overrides)  # makes the name known to torch; activates nothing
