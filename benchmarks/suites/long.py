"""One sequence as long as a GPU holds, grouped heads, causal: a forward and a backward, timed once, and the peak memory of it all."""

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flash_attn_ext._selfcheck import peak_memory

from .. import rivals, runner
from ..cells import DTYPES, Cell
from ..timing import reason

WARM_ROWS = 1024  # a first call that loads the kernels


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES))
    parser.add_argument("--length", type=int, default=2**20)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _train(rival: rivals.Rival, cell: Cell, device: str) -> tuple[dict[str, float], int | None, bool]:
    """Seconds of each direction, bytes at the peak with inputs, output and gradients, and whether all gradients are finite."""
    tensors = cell.tensors(device, requires_grad=True)
    leaves = tensors[:3]
    grad_out = torch.randn_like(leaves[0])
    gradients: tuple[Tensor, ...] = ()
    seconds: dict[str, float] = {}

    def both() -> None:
        nonlocal gradients
        begin = _now(device)
        out = rival.attention(*tensors, cell)
        seconds["forward"] = _now(device) - begin
        gradients = torch.autograd.grad(out, leaves, grad_out)
        seconds["backward"] = _now(device) - begin - seconds["forward"]

    with rival.context():
        more = peak_memory(device, both)
    held = sum(tensor.nbytes for tensor in (*leaves, grad_out))
    finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
    return seconds, None if more is None else more + held, finite


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    cell = Cell(args.dtype, 1, args.heads, args.kv_heads, args.length, args.length, args.head_dim, True)
    short = replace(cell, rows=min(WARM_ROWS, args.length), keys=min(WARM_ROWS, args.length))
    for rival, _ in runner.walk(runner.chosen(args, (rivals.OURS,)), args.budget, lambda rival: rival.name):
        seconds, peak, finite, refused = {}, None, "", ""
        try:
            _train(rival, short, args.device)
            seconds, peak, finite = _train(rival, cell, args.device)
        except Exception as error:
            refused = reason(error)
        for direction, flops in (("forward", cell.forward_flops), ("backward", cell.backward_flops)):
            taken = seconds.get(direction)
            yield {
                **cell.row(), "direction": direction, "rival": rival.name,
                "milliseconds": taken and f"{taken * 1e3:.1f}", "tflops": taken and f"{flops / taken / 1e12:.4g}",
                "peak_gib": "" if peak is None else f"{peak / 2**30:.2f}", "finite": finite, "refused": refused,
            }  # fmt: skip
