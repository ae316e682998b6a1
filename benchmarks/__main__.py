"""python -m benchmarks SUITE [options]: runs one suite and writes its rows to benchmarks/results as they come.

A suite stops when its budget of seconds is spent; what was not measured then is said on stderr. `python -m benchmarks.report`
turns the CSV files into a Markdown table and pictures.
"""

import argparse
import csv
import datetime
import importlib
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from . import provenance

SUITES = {
    "train": "forward and backward over head dims, masks and lengths",
    "decode": "one query row per sequence against a long cache",
    "host": "host time of one call",
    "memory": "peak extra memory over the length",
    "long": "one sequence of a million tokens, forward and backward, with its peak memory",
    "cpu": "forward and backward on the CPU",
    "features": "what a feature costs beside dense attention",
    "errors": "errors against fp64 of the output and of each gradient",
    "traffic": "bytes to and from HBM over the length, counted by ncu",
}
RESULTS = Path(__file__).parent / "results"


class Table:
    """A CSV file that is complete after every row, and begins with the first."""

    def __init__(self, path: Path) -> None:
        self.path, self.count = path, 0
        self.writer: csv.DictWriter[str] | None = None

    def add(self, row: dict[str, Any]) -> None:
        if self.writer is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("w", newline="")
            self.writer = csv.DictWriter(self.file, list(row))
            self.writer.writeheader()
        self.writer.writerow(row)
        self.file.flush()
        self.count += 1


def parser_of(suite: str) -> argparse.ArgumentParser:
    module = importlib.import_module(f"{__package__}.suites.{suite}")
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {suite}", description=module.__doc__)
    cuda = torch.cuda.is_available() and suite != "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds that the suite may take")
    parser.add_argument("--rounds", type=int, default=10, help="rounds over all rivals, at most, per cell")
    parser.add_argument("--rivals", nargs="+", help="of the names in benchmarks/rivals.py; default: the suite's own choice")
    parser.add_argument("--out", type=Path, help="the CSV file; default: benchmarks/results/SUITE-DEVICE-TIME.csv")
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
    parser.set_defaults(run=module.run)
    return parser


def _default_path(suite: str, device: str) -> Path:
    name = re.sub(r"[^A-Za-z0-9]+", "-", torch.cuda.get_device_name() if device == "cuda" else "cpu").strip("-")
    return RESULTS / f"{suite}-{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}.csv"


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    top = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    listing = "\n".join(f"{name}: {what}" for name, what in SUITES.items())
    top.add_argument("suite", choices=list(SUITES), metavar="SUITE", help=listing + "\n(SUITE --help: its options)")
    suite = top.parse_args(arguments[:1]).suite
    args = parser_of(suite).parse_args(arguments[1:])
    torch.manual_seed(0)
    table = Table(args.out or _default_path(suite, args.device))
    rows: Iterable[dict[str, Any]] = args.run(args)
    try:
        for row in rows:
            table.add({"suite": suite, **row, **provenance.columns(args.device)})
    except KeyboardInterrupt:
        print("\nstopped; what was measured is kept", file=sys.stderr)
    print(f"{table.count} rows in {table.path}" if table.count else "nothing was measured, no file written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
