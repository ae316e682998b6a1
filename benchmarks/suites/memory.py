"""Peak memory of forward and backward beyond inputs, results and gradients, over the length, beside standard attention."""

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from flash_attn_ext._selfcheck import peak_memory

from .. import rivals, runner
from ..cells import DTYPES, Cell
from ..timing import reason

DEFAULT_RIVALS = (rivals.OURS, "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "standard")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], choices=list(DTYPES))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--masks", nargs="+", default=["causal"], choices=["none", "causal"])
    parser.add_argument("--limit", type=float, default=64e9, help="bytes of scores above which standard attention is not tried")


def _extra(rival: rivals.Rival, cell: Cell, device: str) -> tuple[int | None, int | None]:
    """(forward, backward) bytes; None where the machine cannot tell."""
    tensors = cell.tensors(device, requires_grad=True)
    leaves = tensors[:3]
    kept: dict[str, Any] = {}

    def forward() -> None:
        kept["out"] = rival.attention(*tensors, cell)

    def backward() -> None:
        kept["gradients"] = torch.autograd.grad(kept["out"], leaves, kept["grad_out"])

    with rival.context():
        forward()  # a first round, because what is allocated once for all is not what a call costs
        kept["grad_out"] = torch.randn_like(kept["out"])
        backward()
        del kept["out"], kept["gradients"]
        first = peak_memory(device, forward)
        second = peak_memory(device, backward)
    return (
        None if first is None else first - kept["out"].nbytes,
        None if second is None else second - sum(gradient.nbytes for gradient in kept["gradients"]),
    )


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    chosen = runner.chosen(args, DEFAULT_RIVALS)
    todo = [
        (Cell(dtype, 1, args.heads, args.heads, length, length, args.head_dim, mask == "causal"), rival)
        for dtype in args.dtypes
        for mask in args.masks
        for length in args.lengths
        for rival in chosen
    ]
    for (cell, rival), _ in runner.walk(todo, args.budget, lambda item: f"{item[0]}: {item[1].name}"):
        extra: tuple[int | None, int | None] = (None, None)
        refused = ""
        if rival.name in ("standard", "sdpa-math") and cell.heads * cell.rows * cell.keys * 8 > args.limit:
            refused = "scores would not fit"
        else:
            try:
                extra = _extra(rival, cell, args.device)
            except Exception as error:
                refused = reason(error)
        for direction, size in zip(("forward", "backward"), extra, strict=True):
            yield {
                **cell.row(), "direction": direction, "rival": rival.name, "extra_bytes": "" if size is None else size,
                "lse_bytes": 4 * cell.batch * cell.heads * cell.rows, "refused": refused,
            }  # fmt: skip
