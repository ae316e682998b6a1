"""Where a number comes from: the columns that every row of every CSV carries."""

import datetime
import functools
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from flash_attn_ext.__main__ import processor

_CLOCKS_MAX_AGE = 20.0  # seconds; asking nvidia-smi takes some tenths of one


def _output(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True, cwd=Path(__file__).parent
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


class _Clocks:
    def __init__(self) -> None:
        self.taken, self.text = -_CLOCKS_MAX_AGE, ""

    def __call__(self) -> str:
        """SM clock, memory clock, temperature, power: "1980 MHz, 3201 MHz, 45, 310.22 W". Empty without a GPU."""
        if time.monotonic() - self.taken > _CLOCKS_MAX_AGE:
            fields = "clocks.sm,clocks.mem,temperature.gpu,power.draw"
            self.text = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0")
            self.taken = time.monotonic()
        return self.text


_clocks = _Clocks()


@functools.cache
def _fixed(device: str) -> dict[str, Any]:
    cudnn = torch.backends.cudnn.version() if device == "cuda" else ""
    status = _output("git", "status", "--porcelain", "--untracked-files=no")
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{processor()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "cudnn": cudnn,
        "commit": _output("git", "rev-parse", "--short", "HEAD") + ("+" if status else ""),
    }


def columns(device: str) -> dict[str, Any]:
    now = datetime.datetime.now().isoformat(timespec="seconds")
    return {**_fixed(device), "clocks": _clocks() if device == "cuda" else "", "date": now}
