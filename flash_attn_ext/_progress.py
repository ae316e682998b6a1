"""Progress on stderr, so that what a command prints can be piped or pasted."""

import sys
import time


class Progress:
    """One line with a bar, rewritten on a terminal; elsewhere a line now and then."""

    WIDTH = 100

    def __init__(self, total: int, quiet_seconds: float = 5.0) -> None:
        self.total, self.done, self.start = total, 0, time.monotonic()
        self.terminal = sys.stderr.isatty()
        self.quiet_seconds, self.printed = quiet_seconds, -quiet_seconds

    def step(self, what: str) -> None:
        """Announces a step that is about to run; the bar shows how many went before."""
        elapsed = time.monotonic() - self.start
        filled = 20 * self.done // max(self.total, 1)
        line = f"[{'#' * filled}{'.' * (20 - filled)}] {self.done}/{self.total} {elapsed:4.0f} s  {what}"[: self.WIDTH]
        self.done += 1
        if self.terminal:
            print(f"\r{line:<{self.WIDTH}}", end="", file=sys.stderr, flush=True)
        elif elapsed - self.printed >= self.quiet_seconds:
            self.printed = elapsed
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.terminal:
            print("\r" + " " * self.WIDTH + "\r", end="", file=sys.stderr, flush=True)
