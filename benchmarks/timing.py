"""How time is taken: rivals in interleaved rounds, cold L2, median. One loop for every suite."""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

FLUSH_BYTES = 256 * 2**20  # more than twice the largest L2 of today's GPUs
PAUSE_CYCLES = 1_000_000  # half a millisecond: a backward call wakes autograd's thread, which may outlast the flush


@dataclass
class Call:
    """Something to time. context is entered outside the timed section: a choice of backend must not count as its cost."""

    function: Callable[[], object]
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    seconds: list[float] = field(default_factory=list)
    refused: str = ""

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None


class Stopwatch:
    """Seconds of one call: the wall clock, or CUDA events behind a pause and an L2 flush, under which the host launches it all."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        if self.cuda:
            self.flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
            self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self, call: Call) -> float:
        with call.context():
            if not self.cuda:
                begin = time.perf_counter()
                call.function()
                return time.perf_counter() - begin
            torch.cuda._sleep(PAUSE_CYCLES)
            self.flush.zero_()
            self.begin.record()
            call.function()
            self.end.record()
            self.end.synchronize()
            return self.begin.elapsed_time(self.end) / 1e3


def interleaved(
    calls: dict[str, Call], stopwatch: Callable[[Call], float], rounds: int, seconds: float, warmup: int = 2
) -> None:
    """Fills in seconds of every call: rounds over all of them, the order reversed every second round: 3 at least, then
    until `rounds` or `seconds` is used up. A call that raises is marked refused, with the first line of its reason."""
    deadline = time.monotonic() + seconds

    def attempt(call: Call, keep: bool) -> None:
        if call.refused:
            return
        try:
            taken = stopwatch(call)
        except Exception as error:
            call.refused = reason(error)
        else:
            call.seconds += [taken] if keep else []

    for call in calls.values():
        for _ in range(warmup):
            attempt(call, keep=False)
    for done in range(rounds):
        if done >= 3 and time.monotonic() > deadline:
            break
        for call in calls.values() if done % 2 == 0 else reversed(calls.values()):
            attempt(call, keep=True)


def reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]


class Budget:
    """Divides the seconds that a suite may take among the cells that are left."""

    def __init__(self, seconds: float, cells: int) -> None:
        self.deadline, self.cells = time.monotonic() + seconds, cells

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def next_cell(self) -> float:
        """Seconds for the next cell; 0 if the budget is spent."""
        share = max(self.left(), 0.0) / max(self.cells, 1)
        self.cells -= 1
        return share
