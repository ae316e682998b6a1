"""Forward and backward of self-attention at 16k tokens and heads * head_dim = 2048: TFLOP/s of every rival, interleaved."""

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from .. import cells, rivals, runner
from ..timing import Call

DEFAULT_RIVALS = (rivals.OURS, "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "flash_attn", "flash_attn_3", "flash_attn.cute")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cells.add_arguments(parser)
    parser.add_argument("--directions", nargs="+", default=["forward", "backward"], choices=["forward", "backward"])
    parser.add_argument("--gemm", type=int, default=8192, help="side of the square product that measures the ceiling")


def _gemm(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The ceiling in the same run: one square matrix product per dtype, as a row with direction "gemm"."""
    side = args.gemm
    for dtype in args.dtypes:
        left, right = (torch.randn(side, side, device=args.device, dtype=cells.DTYPES[dtype]) for _ in range(2))
        calls = {"gemm": Call(lambda left=left, right=right: left @ right)}  # type: ignore[misc]
        runner.time_calls(calls, args.device, args.rounds, seconds=5.0)
        cell = cells.Cell(dtype, 1, 1, 1, side, side, side, False)
        yield from runner.rows(
            cell, "gemm", calls, lambda seconds: {"tflops": f"{2 * side**3 / seconds / 1e12:.3f}"}, difference=""
        )


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    chosen = runner.chosen(args, DEFAULT_RIVALS)
    yield from _gemm(args)
    torch.use_deterministic_algorithms(args.deterministic, warn_only=True)
    todo = [(direction, cell) for cell in cells.square_cells(args) for direction in args.directions]
    for (direction, cell), seconds in runner.walk(todo, args.budget, lambda item: f"{item[1]} {item[0]}"):
        backward = direction == "backward"
        tensors = cell.tensors(args.device, requires_grad=backward)
        calls = (runner.backward_calls if backward else runner.forward_calls)(chosen, tensors, cell)
        runner.time_calls(calls, args.device, args.rounds, seconds)
        flops = cell.backward_flops if backward else cell.forward_flops
        has_ours = not backward and rivals.OURS in calls
        gap = runner.difference(calls, rivals.OURS) if has_ours else None

        def rate(seconds: float, flops: float = flops) -> dict[str, Any]:
            return {"tflops": f"{flops / seconds / 1e12:.3f}"}

        yield from runner.rows(cell, direction, calls, rate, difference="" if gap is None else f"{gap:.2e}")
        del tensors, calls
