"""Exact attention whose memory grows linearly with sequence length, as one operator: torch.ops.flash.attention.

attention() takes the place of torch.nn.functional.scaled_dot_product_attention call for call and adds windows, both causal
alignments, softcap, ALiBi, learnable sinks and a differentiable logsumexp; attention_varlen() takes packed sequences,
attention_decode() few rows over a long, possibly paged cache, merge() combines partial results, explain() says which kernel a
call runs and why; activate() puts torch's own SDPA on these kernels. `python -m flash_attn_ext` checks an installation.
"""

from . import _load

_load.load()

from ._companions import watch  # noqa: E402  (the operators must exist before anything refers to them)
from ._takeover import activate, deactivate, sdpa  # noqa: E402
from .functional import attention, attention_decode, attention_varlen, explain, merge  # noqa: E402

watch()

__version__ = _load.version()
__all__ = [
    "activate",
    "attention",
    "attention_decode",
    "attention_varlen",
    "deactivate",
    "explain",
    "merge",
    "sdpa",
]
