"""Bytes that standard attention and ours move to and from HBM, over the length: the reason for all of this, counted by ncu."""

import argparse
import csv
import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .. import rivals
from ..cells import DTYPES, Cell

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
MARKER = "spin_kernel"  # torch.cuda._sleep's kernel: one before every measured call, so that ncu's list can be cut into calls
DIRECTIONS = ("forward", "backward")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES))
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--ncu", default="ncu", help="the profiler's command")


def cells(args: argparse.Namespace) -> list[Cell]:
    return [Cell(args.dtype, 1, args.heads, args.heads, length, length, args.head_dim, args.causal) for length in args.lengths]


def parse(text: str) -> list[dict[str, float]]:
    """What `ncu --csv --print-units base` wrote -> per marked call the sum of each metric over its kernels, and "kernels"."""
    lines = text.splitlines()
    header = next((index for index, line in enumerate(lines) if line.startswith('"ID"')), None)
    if header is None:
        raise ValueError("ncu printed no table: " + (lines[-1] if lines else "nothing at all"))
    calls: list[dict[str, float]] = []
    previous = ""
    for record in csv.DictReader(io.StringIO("\n".join(lines[header:]))):
        fresh = record["ID"] != previous  # one line per kernel and metric
        previous = record["ID"]
        if re.search(MARKER, record["Kernel Name"]):
            if fresh:
                calls.append(dict.fromkeys((*METRICS, "kernels"), 0.0))
        elif calls and record["Metric Name"] in METRICS:
            calls[-1][record["Metric Name"]] += float(record["Metric Value"].replace(",", ""))
            calls[-1]["kernels"] += fresh
    return calls


def profile(args: argparse.Namespace, names: Iterable[str]) -> list[dict[str, float]]:
    """Runs benchmarks/traffic_target.py under ncu, once for everything."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        target = [sys.executable, "-m", "benchmarks.traffic_target", "--dtype", args.dtype, "--head-dim", str(args.head_dim)]
        target += ["--heads", str(args.heads), "--lengths", *map(str, args.lengths), "--rivals", *names]
        target += ["--causal"] if args.causal else []
        command = [args.ncu, "--csv", "--print-units", "base", "--log-file", str(log), "--profile-from-start", "off"]
        command += ["--metrics", ",".join(METRICS), *target]
        try:
            subprocess.run(command, check=True, timeout=args.budget, stdout=sys.stderr, cwd=Path(__file__).parents[2])
        except subprocess.CalledProcessError as error:
            raise SystemExit(
                f"ncu failed with status {error.returncode}: {log.read_text()[-600:] if log.exists() else ''}"
            ) from error
        return parse(log.read_text())


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if args.device != "cuda" or shutil.which(args.ncu) is None:
        raise SystemExit(f"the traffic suite needs a GPU and {args.ncu} on the PATH (Nsight Compute)")
    names = args.rivals or [rivals.OURS, "standard"]
    labels = [(cell, name, direction) for cell in cells(args) for name in names for direction in DIRECTIONS]
    counts = profile(args, names)
    if len(counts) != len(labels):
        raise SystemExit(f"ncu shows {len(counts)} marked calls, expected {len(labels)}")
    for (cell, name, direction), count in zip(labels, counts, strict=True):
        yield {
            **cell.row(), "direction": direction, "rival": name, "bytes_read": int(count[METRICS[0]]),
            "bytes_written": int(count[METRICS[1]]), "kernels": int(count["kernels"]),
        }  # fmt: skip
