"""The flash_attn package's functions on torch.ops.flash: same names, arguments, layouts and meaning.

    from flash_attn_ext.compat import flash_attn_func  # instead of: from flash_attn import flash_attn_func

Tensors are [batch, length, heads, head_dim] here, as in that package; causal masks and windows are aligned to the bottom right;
rows that see nothing give 0. compat.flash_attn_interface has the private functions that sequence-parallel libraries call,
compat.bert_padding the padding helpers, compat.flash_attn_3 FlashAttention-3's functions. `with as_flash_attn():` lets code that
imports flash_attn find all this under that name. What is not supported raises NotImplementedError with the name of the argument.
"""

import contextlib
import sys
import types
from collections.abc import Iterator

from . import bert_padding, flash_attn_3, flash_attn_interface
from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__version__ = "2.8.3"  # of flash_attn: the release whose functions these are
__all__ = [
    "as_flash_attn",
    "bert_padding",
    "flash_attn_3",
    "flash_attn_func",
    "flash_attn_interface",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


@contextlib.contextmanager
def as_flash_attn() -> Iterator[types.ModuleType]:
    """Inside, `import flash_attn`, `flash_attn.flash_attn_interface`, `flash_attn.bert_padding` and FlashAttention-3's
    `flash_attn_interface` give these modules. Code imported inside keeps them. Libraries that ask for an installed distribution
    rather than for a module do not notice."""
    modules = {
        "flash_attn": sys.modules[__name__],
        "flash_attn.flash_attn_interface": flash_attn_interface,
        "flash_attn.bert_padding": bert_padding,
        "flash_attn_interface": flash_attn_3,
    }
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield modules["flash_attn"]
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
