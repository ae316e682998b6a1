"""What the suites share: choosing rivals, walking over cells within the budget, timing forward and backward."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from flash_attn_ext._progress import Progress

from . import rivals
from .cells import Cell
from .timing import Budget, Call, Stopwatch, interleaved, reason

T = TypeVar("T")


def chosen(args: argparse.Namespace, default: Sequence[str]) -> list[rivals.Rival]:
    present, absent = rivals.choose(args.rivals or list(default), args.device)
    for name, why in absent.items():
        print(f"left out: {name}: {why}", file=sys.stderr)
    return present


def walk(cells: Sequence[T], budget_seconds: float, label: Callable[[T], str] = str) -> Iterator[tuple[T, float]]:
    """(cell, seconds that it may take), with a progress bar, until the budget is spent; then names what is left."""
    progress, budget = Progress(len(cells)), Budget(budget_seconds, len(cells))
    for index, cell in enumerate(cells):
        seconds = budget.next_cell()
        if seconds <= 0.0:
            print(f"\nbudget spent, not measured: {'; '.join(map(label, cells[index:]))}", file=sys.stderr)
            break
        progress.step(label(cell))
        yield cell, seconds
    progress.close()


def forward_calls(chosen_rivals: Sequence[rivals.Rival], tensors: Sequence[Any], cell: Cell) -> dict[str, Call]:
    def call(rival: rivals.Rival) -> Call:
        def run() -> Tensor:
            with torch.no_grad():
                return rival.attention(*tensors, cell)

        return Call(run, rival.context)

    return {rival.name: call(rival) for rival in chosen_rivals}


def backward_calls(chosen_rivals: Sequence[rivals.Rival], tensors: Sequence[Any], cell: Cell) -> dict[str, Call]:
    """Backward with torch's autograd call around it, over a graph that is kept. tensors require grad."""
    leaves = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]

    def call(rival: rivals.Rival) -> Call:
        try:
            with rival.context():
                out = rival.attention(*tensors, cell)
        except Exception as error:
            return Call(lambda: None, refused=reason(error))
        grad_out = torch.randn_like(out)
        return Call(lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True), rival.context)

    return {rival.name: call(rival) for rival in chosen_rivals}


def difference(calls: dict[str, Call], name: str) -> float | None:
    """Largest |out - out of the first other rival|: a fast kernel that is wrong must not look good."""
    other = next(
        (key for key, call in calls.items() if key != name and not key.startswith(rivals.OURS) and not call.refused), None
    )
    if other is None or calls[name].refused:
        return None
    outputs = []
    for key in (name, other):
        with calls[key].context():
            outputs.append(calls[key].function())
    return float((outputs[0].float() - outputs[1].float()).abs().max())  # type: ignore[attr-defined]


def rows(
    cell: Cell, direction: str, calls: dict[str, Call], rate: Callable[[float], dict[str, Any]], **more: Any
) -> Iterator[dict[str, Any]]:
    for name, call in calls.items():
        seconds = call.median
        rates = rate(seconds) if seconds else dict.fromkeys(rate(1.0), "")
        milliseconds = f"{seconds * 1e3:.5f}" if seconds else ""
        yield {
            **cell.row(), "direction": direction, "rival": name, "milliseconds": milliseconds, **rates,
            "calls": len(call.seconds), "refused": call.refused, **more,
        }  # fmt: skip


def time_calls(calls: dict[str, Call], device: str, rounds: int, seconds: float) -> None:
    waiting = {name: call for name, call in calls.items() if not call.refused}
    interleaved(waiting, Stopwatch(device), rounds, seconds)
