"""Registers the flop formula and the sharding rule once, and only if, the module of torch that they extend is imported.

Importing torch.distributed.tensor costs about a second, so that a program which never shards must not pay for it.
"""

import importlib
import importlib.abc
import importlib.util
import sys
import types
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec

_COMPANIONS = {"torch.utils.flop_counter": "flops", "torch.distributed.tensor": "dtensor"}


def _register(name: str) -> None:
    try:
        importlib.import_module(f"{__package__}.{_COMPANIONS[name]}")
    except Exception as error:  # an extension of a torch module must never keep that module from being imported
        warnings.warn(f"flash_attn_ext could not extend {name}: {error}", stacklevel=2)


class _Watcher(importlib.abc.MetaPathFinder):
    """Lets the ordinary finders find a watched module and runs _register behind its loader."""

    def __init__(self) -> None:
        self.waiting = set(_COMPANIONS)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        self.waiting.discard(fullname)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: types.ModuleType) -> None:
            execute(module)
            _register(fullname)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def watch() -> None:
    """Extends the watched modules that are there already and waits for the others."""
    watcher = _Watcher()
    for name in _COMPANIONS:
        if name in sys.modules:
            watcher.waiting.discard(name)
            _register(name)
    if watcher.waiting:
        sys.meta_path.insert(0, watcher)
