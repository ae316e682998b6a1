"""What a feature costs: the rate of attention with it beside the dense rate of the same shape, ours alone, interleaved."""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import flash_attn_ext

from .. import runner
from ..cells import DTYPES, Cell
from ..timing import Call

FEATURES = ("dense", "fp16", "gqa", "packed", "window", "softcap", "sinks")
WINDOW = 1024  # keys that a row sees
GROUP = 4  # query heads per key head


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096, 16384])
    parser.add_argument("--tokens", type=int, default=16384, help="batch * length")
    parser.add_argument("--features", nargs="+", default=list(FEATURES), choices=FEATURES)
    parser.add_argument("--directions", nargs="+", default=["forward", "backward"], choices=["forward", "backward"])


def _seen(cell: Cell, feature: str) -> float:
    """Keys that a row sees on average, in the convention that a causal row sees half of them."""
    if feature != "window" or cell.keys <= WINDOW:
        return cell.keys / 2
    return WINDOW - WINDOW * WINDOW / 2 / cell.keys


def _attention(cell: Cell, feature: str, device: str) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Causal attention with the feature, and its differentiable inputs."""
    dtype = torch.float16 if feature == "fp16" else DTYPES[cell.dtype]
    kv_heads = cell.heads // GROUP if feature == "gqa" else cell.heads
    packed = feature == "packed"
    lead = (cell.batch * cell.rows,) if packed else (cell.batch, cell.rows)

    def normal(heads: int) -> Tensor:
        memory = torch.randn(*lead, heads, cell.head_dim, device=device, dtype=dtype)
        return (memory if packed else memory.transpose(1, 2)).requires_grad_()

    tensors = [normal(cell.heads), normal(kv_heads), normal(kv_heads)]
    if packed:
        starts = torch.arange(0, cell.batch * cell.rows + 1, cell.rows, device=device, dtype=torch.int32)

        def run_packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return flash_attn_ext.attention_varlen(query, key, value, starts, starts, cell.rows, cell.rows, causal=True)

        return run_packed, tensors
    options: dict[str, Any] = {
        "window": {"window": (WINDOW - 1, 0)},
        "softcap": {"softcap": 30.0},
        "sinks": {"sinks": torch.randn(cell.heads, device=device)},
    }.get(feature, {})
    return lambda query, key, value: flash_attn_ext.attention(query, key, value, causal=True, **options), tensors


def _calls(args: argparse.Namespace, cell: Cell, direction: str) -> dict[str, Call]:
    calls = {}
    for feature in args.features:
        attention, tensors = _attention(cell, feature, args.device)
        if direction == "forward":

            def run(attention: Callable[..., Tensor] = attention, tensors: list[Tensor] = tensors) -> Tensor:
                with torch.no_grad():
                    return attention(*tensors)

        else:
            out = attention(*tensors)
            gradient = torch.randn_like(out)

            def run(out: Tensor = out, tensors: list[Tensor] = tensors, gradient: Tensor = gradient) -> Any:  # type: ignore[misc]
                return torch.autograd.grad(out, tensors, gradient, retain_graph=True)

        calls[feature] = Call(run)
    return calls


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    shapes = [
        Cell("bf16", max(args.tokens // length, 1), 2048 // head_dim, 2048 // head_dim, length, length, head_dim, True)
        for head_dim in args.head_dims
        for length in args.lengths
    ]
    todo = [(direction, cell) for cell in shapes for direction in args.directions]
    for (direction, cell), seconds in runner.walk(todo, args.budget, lambda item: f"{item[1]} {item[0]}"):
        calls = _calls(args, cell, direction)
        runner.time_calls(calls, args.device, args.rounds, seconds)
        rates = {
            feature: 4e-12 * cell.batch * cell.heads * cell.rows * cell.head_dim * _seen(cell, feature) / call.median
            * (1.0 if direction == "forward" else 2.5)
            for feature, call in calls.items()
            if call.median
        }  # fmt: skip
        for feature, call in calls.items():
            rate = rates.get(feature, 0.0)
            dense = rates.get("dense", 0.0)
            yield {
                **cell.row(), "direction": direction, "rival": feature,
                "milliseconds": f"{1e3 * call.median:.5f}" if call.median else "", "tflops": f"{rate:.6g}",
                "of_dense": f"{rate / dense:.4g}" if dense else "", "calls": len(call.seconds), "refused": call.refused,
            }  # fmt: skip
        del calls
