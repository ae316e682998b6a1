"""torch's own SDPA on these kernels: switches the overrides of the four operators of its flash backend (csrc/op/takeover.cpp) on and
off, through torch's public registry.

What those operators cannot pass on (dropout, whose random state is torch's own; used lengths; pages) still runs torch's kernels, and
so do their variants for fp8. At this level is_causal is aligned to the bottom right, lse is natural and fp32, and backward may be
given the out and lse of a whole ring (torch's context parallel does).
"""

import contextlib
from collections.abc import Iterator

import torch
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
# Arguments of the operators, as torch 2.11 to 2.14 have them; in brackets those that not every release has.
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
    if found != known[: len(found)]:
        return f"it has its arguments in the order {', '.join(found)}"
    if len(schema.returns) != returns:
        return f"it returns {len(schema.returns)} values instead of {returns}"
    return ""


class Overrides:
    """The overrides of one dispatch key, in force until remove()."""

    def __init__(self, key: str = "CUDA"):
        for name in _KNOWN:
            if wrong := unknown_schema(name, getattr(torch.ops.aten, name).default._schema):
                raise RuntimeError(
                    f"flash_attn_ext cannot take over SDPA in torch {torch.__version__}: aten::{name} is not one that it knows, "
                    f"{wrong}. torch.ops.flash.attention and flash_attn_ext.attention work all the same."
                )
        self.key = key
        torch.ops.flash.override_sdpa(key, True)

    def remove(self) -> None:
        torch.ops.flash.override_sdpa(self.key, False)


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
        RuntimeError: this torch has other operators than those that are known (2.11 to 2.14 are).
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
    before, preferred = current_flash_attention_impl(), _priority is not None
    activate(prefer=prefer)
    try:
        yield
    finally:
        deactivate()
        if before is not None:
            activate_flash_attention_impl(before)
        if preferred:
            _prefer()


register_flash_attention_impl(NAME, register_fn=Overrides)  # makes the name known to torch; activates nothing
