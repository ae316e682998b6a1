"""Errors against fp64 of the output and of each gradient, beside torch's own SDPA, over dtypes, head dims, masks and lengths."""

import argparse
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import rivals, runner
from ..cells import Cell
from ..timing import reason

DEFAULT_RIVALS = (rivals.OURS, "sdpa")
NAMES = ("out", "dquery", "dkey", "dvalue")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16", "fp16"], choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[32, 64, 96, 128, 256])
    parser.add_argument("--lengths", nargs="+", type=int, default=[100, 512, 1024, 2048])
    parser.add_argument("--masks", nargs="+", default=["none", "causal"], choices=["none", "causal"])
    parser.add_argument("--heads", type=int, default=2)


def _exact(cell: Cell, grad: Tensor, *tensors: Tensor) -> list[Tensor]:
    """out, dquery, dkey, dvalue of plain attention in fp64."""
    query, key, value = (tensor.detach().double().requires_grad_() for tensor in tensors)
    score = query @ key.mT / math.sqrt(cell.head_dim)
    if cell.causal:
        seen = torch.ones(cell.rows, cell.keys, dtype=torch.bool, device=score.device).tril()
        score = score.masked_fill(~seen, -math.inf)
    out = score.softmax(-1) @ value
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), grad.double())]


def _errors(result: Tensor, exact: Tensor) -> dict[str, str]:
    """Root mean square and largest difference, both relative to the root mean square of what is exact."""
    size, difference = exact.square().mean().sqrt(), result.double() - exact
    return {"rms": f"{difference.square().mean().sqrt() / size:.3e}", "largest": f"{difference.abs().max() / size:.3e}"}


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    chosen = runner.chosen(args, DEFAULT_RIVALS)
    todo = [
        Cell(dtype, 1, args.heads, args.heads, length, length, head_dim, mask == "causal")
        for length in args.lengths
        for dtype in args.dtypes
        for head_dim in args.head_dims
        for mask in args.masks
    ]
    above, compared = 0, 0
    for cell, _ in runner.walk(todo, args.budget):
        tensors = cell.tensors(args.device, requires_grad=True)
        leaves = tensors[:3]
        grad = torch.randn_like(leaves[0])
        exact = _exact(cell, grad, *leaves)
        rms: dict[tuple[str, str], float] = {}
        for rival in chosen:
            try:
                with rival.context():
                    out = rival.attention(*tensors, cell)
                    results = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
            except Exception as error:
                yield {**cell.row(), "rival": rival.name, "of": "", "rms": "", "largest": "", "refused": reason(error)}
                continue
            for name, result, right in zip(NAMES, results, exact, strict=True):
                errors = _errors(result, right)
                rms[rival.name, name] = float(errors["rms"])
                yield {**cell.row(), "rival": rival.name, "of": name, **errors, "refused": ""}
        for name in NAMES:
            others = [rms[rival.name, name] for rival in chosen if rival.name != rivals.OURS and (rival.name, name) in rms]
            if others and (rivals.OURS, name) in rms:
                compared += 1
                if rms[rivals.OURS, name] > min(others):
                    above += 1
                    print(f"\n{cell}: {name} {rms[rivals.OURS, name]:.2e}, least other {min(others):.2e}", file=sys.stderr)
    print(f"ours is above the least other one in {above} of {compared}", file=sys.stderr)
