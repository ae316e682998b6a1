"""Host time of one call on a tiny problem, which the GPU always finishes first: microseconds, forward and with backward."""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .. import rivals, runner
from ..cells import DTYPES, Cell
from ..timing import Call, interleaved

DEFAULT_RIVALS = (rivals.OURS, "ours-op", "sdpa", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "flash_attn", "flash_attn_3")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES))
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--calls", type=int, default=200, help="calls without a synchronisation per timed round")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    cell = Cell(args.dtype, 1, args.heads, args.heads, args.length, args.length, args.head_dim, causal=False)
    chosen = runner.chosen(args, DEFAULT_RIVALS)

    def stopwatch(call: Call) -> float:
        with call.context():
            if args.device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(args.calls):
                call.function()
            return (time.perf_counter() - begin) / args.calls

    def call(rival: rivals.Rival, training: bool) -> Call:
        tensors = cell.tensors(args.device, requires_grad=training)
        gradient = torch.randn_like(tensors[0])

        def forward() -> object:
            return rival.attention(*tensors, cell)

        def forward_and_backward() -> object:
            return torch.autograd.grad(rival.attention(*tensors, cell), tensors[:3], gradient)

        @contextmanager
        def context() -> Iterator[None]:
            with rival.context(), torch.set_grad_enabled(training):
                yield

        return Call(forward_and_backward if training else forward, context)

    for direction, seconds in runner.walk(["forward", "forward + backward"], args.budget):
        calls = {rival.name: call(rival, direction != "forward") for rival in chosen}
        interleaved(calls, stopwatch, args.rounds, seconds)
        yield from runner.rows(cell, direction, calls, lambda seconds: {"microseconds": f"{seconds * 1e6:.2f}"})
