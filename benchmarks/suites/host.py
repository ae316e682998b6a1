"""Host time of one call on a tiny problem, which the GPU always finishes first: microseconds, forward and with backward.

Beside the operator alone (`ours-op`) and `attention` (`ours`) stand the doors of programs that are written already: flash_attn's
function (`ours-compat`), transformers' attention function as a layer calls it (`ours-transformers`), SDPA taken over
(`ours-takeover`); for one row over a cache attention_decode (`ours`) and flash_attn_with_kvcache (`ours-compat`) beside that operator.
"""

import argparse
import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

import flash_attn_ext

from .. import rivals, runner
from ..cells import DTYPES, Cell
from ..timing import Call, interleaved

DEFAULT_RIVALS = (rivals.OURS, "ours-op", "sdpa", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "flash_attn", "flash_attn_3")
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES))
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--calls", type=int, default=200, help="calls without a synchronisation per timed round")


def _call(function: Function, tensors: tuple[Tensor, ...], context: Callable[[], AbstractContextManager[object]]) -> Call:
    """tensors: query, key, value in the layout of the function. With backward where they require grad."""
    training = tensors[0].requires_grad
    gradient: Tensor | None = None

    def forward() -> object:
        return function(*tensors)

    def forward_and_backward() -> object:
        nonlocal gradient
        out = function(*tensors)
        if gradient is None:
            gradient = torch.randn_like(out)
        return torch.autograd.grad(out, tensors, gradient)

    @contextmanager
    def whole() -> Iterator[None]:
        with context(), torch.set_grad_enabled(training):
            yield

    return Call(forward_and_backward if training else forward, whole)


def _doors(tensors: tuple[Tensor, ...], device: str) -> dict[str, Call]:
    from flash_attn_ext import compat

    leaves = tuple(x.detach().transpose(1, 2).requires_grad_(x.requires_grad) for x in tensors)
    calls = {"ours-compat": _call(lambda q, k, v: compat.flash_attn_func(q, k, v), leaves, nullcontext)}
    if importlib.util.find_spec("transformers") is not None:
        from flash_attn_ext.integrations.transformers import attention

        layer, positions = torch.nn.Identity(), torch.arange(tensors[0].shape[2], device=device)[None]
        layer.is_causal = True  # type: ignore[assignment]

        def transformers(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attention(layer, query, key, value, None, dropout=0.0, scaling=0.125, position_ids=positions)[0]

        calls["ours-transformers"] = _call(transformers, tensors, nullcontext)
    if device == "cuda":
        sdpa = torch.nn.functional.scaled_dot_product_attention
        calls["ours-takeover"] = _call(lambda q, k, v: sdpa(q, k, v), tensors, flash_attn_ext.sdpa)
    return calls


def _decode(cell: Cell, device: str) -> dict[str, Call]:
    from flash_attn_ext import compat

    query, key, value = cell.tensors(device, requires_grad=False)[:3]
    lengths = torch.full((cell.batch,), cell.keys, dtype=torch.int32, device=device)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return {
        "ours-op": Call(lambda: torch.ops.flash.attention_decode(query, key, value, lengths)),
        "ours": Call(lambda: flash_attn_ext.attention_decode(query, key, value, lengths)),
        "ours-compat": Call(lambda: compat.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)),
    }


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    cell = Cell(args.dtype, 1, args.heads, args.heads, args.length, args.length, args.head_dim, causal=False)
    one_row = Cell(args.dtype, 1, args.heads, args.heads, 1, args.length, args.head_dim, causal=False)
    chosen = runner.chosen(args, DEFAULT_RIVALS)

    def stopwatch(call: Call) -> float:
        with call.context():
            if args.device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(args.calls):
                call.function()
            return (time.perf_counter() - begin) / args.calls

    def calls_of(direction: str) -> dict[str, Call]:
        if direction == "decode":
            return _decode(one_row, args.device)
        tensors = cell.tensors(args.device, requires_grad=direction != "forward")[:3]

        def call(rival: rivals.Rival) -> Call:
            return _call(lambda q, k, v: rival.attention(q, k, v, None, cell), tensors, rival.context)

        calls = {rival.name: call(rival) for rival in chosen}
        return calls | (_doors(tensors, args.device) if rivals.OURS in calls else {})

    for direction, seconds in runner.walk(["forward", "forward + backward", "decode"], args.budget):
        calls = calls_of(direction)
        interleaved(calls, stopwatch, args.rounds, seconds)
        yield from runner.rows(
            one_row if direction == "decode" else cell,
            direction,
            calls,
            lambda seconds: {"microseconds": f"{seconds * 1e6:.2f}"},
        )
