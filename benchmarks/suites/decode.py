"""One query row per sequence against a long cache of keys and values: bytes of cache read per second, by graph replay."""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import rivals, runner
from ..cells import DTYPES, Cell
from ..timing import Call

DEFAULT_RIVALS = (rivals.OURS, "sdpa-flash", "sdpa-cudnn", "sdpa-efficient")
# batch, keys, heads, kv heads, head dim: the cells of other published tables, from latency-bound to bandwidth-bound
SHAPES = (
    (1, 8192, 32, 8, 128),
    (1, 131072, 32, 8, 128),
    (8, 32768, 32, 8, 128),
    (64, 4096, 32, 8, 128),
    (128, 2048, 32, 32, 128),
    (16, 16384, 64, 8, 128),
    (4, 65536, 8, 1, 64),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], choices=list(DTYPES))
    parser.add_argument("--shrink", type=int, default=1, help="divides the batch and the number of keys, for a small machine")


def _graphed(call: Call) -> Call:
    """The call as a graph: what is measured is the kernels, as an inference server runs them."""
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with call.context(), torch.cuda.stream(side):
            for _ in range(3):
                call.function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with call.context(), torch.cuda.graph(graph):
            call.function()
    except Exception as error:
        return Call(call.function, refused=f"{type(error).__name__}: {error}"[:160])
    return Call(graph.replay)


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    chosen = runner.chosen(args, DEFAULT_RIVALS)
    todo = [
        Cell(dtype, max(batch // args.shrink, 1), heads, kv_heads, 1, max(keys // args.shrink, 1), head_dim, causal=False)
        for dtype in args.dtypes
        for batch, keys, heads, kv_heads, head_dim in SHAPES
    ]
    for cell, seconds in runner.walk(todo, args.budget):
        tensors = cell.tensors(args.device, requires_grad=False)
        eager = runner.forward_calls(chosen, tensors, cell)
        gap = runner.difference(eager, rivals.OURS) if rivals.OURS in eager else None
        wrap: Callable[[Call], Call] = _graphed if args.device == "cuda" else lambda call: call
        calls = {name: wrap(call) for name, call in eager.items()}
        runner.time_calls(calls, args.device, args.rounds, seconds)
        read = sum(tensor.numel() * tensor.element_size() for tensor in tensors[1:3] if tensor is not None)

        def rate(seconds: float, read: int = read) -> dict[str, Any]:
            return {"gigabytes_per_second": f"{read / seconds / 1e9:.1f}"}

        yield from runner.rows(cell, "forward", calls, rate, difference="" if gap is None else f"{gap:.2e}")
        del tensors, eager, calls
