"""python -m benchmarks.report CSV...: Markdown tables on stdout and pictures in benchmarks/results (or --pictures DIR)."""

import argparse
import csv
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from . import pictures
from .pictures import Row, kind, unique

OURS = "ours"


def read(paths: Iterable[Path]) -> dict[str, list[Row]]:
    """Rows of all files, by suite."""
    suites: dict[str, list[Row]] = defaultdict(list)
    for path in paths:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                suites[row["suite"]].append(row)
    return suites


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def beside(rows: list[Row], key: Callable[[Row], tuple[str, ...]], value: str, header: Sequence[str], best: str) -> str:
    """One line per key, one column per rival, then ours relative to the best other one (best: "highest" or "lowest" value)."""
    rivals = unique(rows, "rival")
    cells: dict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    for row in rows:
        cells[key(row)][row["rival"]] = row[value] if row[value] else "refused"
    lines = []
    for labels, results in cells.items():
        numbers = {rival: float(text) for rival, text in results.items() if text != "refused"}
        others = [number for rival, number in numbers.items() if not rival.startswith(OURS)]
        ratio = ""
        if OURS in numbers and others:
            leader = max(others) if best == "highest" else min(others)
            ratio = f"{numbers[OURS] / leader:.2f}" if leader > 0 else ""
        shown = [format_number(results.get(rival, "")) for rival in rivals]
        lines.append([*labels, *shown, ratio])
    word = "ours / best other" if best == "highest" else "ours / least other"
    return markdown([*header, *rivals, word], lines)


def format_number(text: str) -> str:
    try:
        number = float(text)
    except ValueError:
        return text
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"


def origin(rows: list[Row]) -> str:
    def all_of(column: str) -> str:
        return ", ".join(value for value in unique(rows, column) if value)

    first, last = rows[0]["date"], rows[-1]["date"]
    clocks = f"; {rows[0]['clocks']}" if rows[0].get("clocks") else ""
    return (
        f"{all_of('device')}{clocks}; torch {all_of('torch')}, "
        f"CUDA {all_of('cuda') or 'none'}, cuDNN {all_of('cudnn') or 'none'}; "
        f"commit {all_of('commit')}; {first} to {last}"
    )


def geomeans(rows: list[Row], value: str) -> Iterable[str]:
    """Ours / every rival over the cells that both ran: per dtype, plain and causal together, every special kind by itself."""
    groups: dict[tuple[str, str], dict[tuple[str, ...], dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row[value]:
            name = "no mask and causal" if kind(row) in ("none", "causal") else kind(row)
            cell = (row["head_dim"], row["batch"], row["rows"], kind(row))
            groups[row["dtype"], name][cell][row["rival"]] = float(row[value])
    for (dtype, name), cells in groups.items():
        texts = []
        for rival in unique(rows, "rival"):
            ratios = [cell[OURS] / cell[rival] for cell in cells.values() if OURS in cell and cell.get(rival, 0.0) > 0]
            if ratios and not rival.startswith(OURS):
                mean = statistics.geometric_mean(ratios)
                texts.append(f"{rival} {mean:.3f} (least {min(ratios):.2f}, {len(ratios)} cells)")
        if texts:
            yield f"Geometric mean of ours / rival, {dtype}, {name}: " + "; ".join(texts)


def train(rows: list[Row]) -> Iterable[str]:
    for row in rows:
        if row["direction"] == "gemm" and row["tflops"]:
            yield f"GEMM ceiling, {row['dtype']} {row['rows']}^3: {format_number(row['tflops'])} TFLOP/s"
    for direction in ("forward", "backward"):
        chosen = [row for row in rows if row["direction"] == direction]
        if chosen:
            yield f"### {direction}, TFLOP/s"
            header = ("dtype", "D", "mask", "B", "S")
            yield beside(
                chosen, lambda r: (r["dtype"], r["head_dim"], kind(r), r["batch"], r["rows"]), "tflops", header, "highest"
            )
            yield from geomeans(chosen, "tflops")


def decode(rows: list[Row]) -> Iterable[str]:
    yield "GB/s of keys and values read"
    header = ("dtype", "B", "rows", "keys", "heads q/kv", "D")

    def key(row: Row) -> tuple[str, ...]:
        return row["dtype"], row["batch"], row["rows"], row["keys"], f"{row['heads']}/{row['kv_heads']}", row["head_dim"]

    yield beside(rows, key, "gigabytes_per_second", header, "highest")


def host(rows: list[Row]) -> Iterable[str]:
    yield "microseconds of host time per call"
    yield beside(rows, lambda r: (r["direction"],), "microseconds", ("call",), "lowest")


def memory(rows: list[Row]) -> Iterable[str]:
    yield "bytes beyond inputs, results and gradients, at the peak"
    header = ("dtype", "mask", "S", "direction", "lse")
    yield beside(
        rows, lambda r: (r["dtype"], kind(r), r["rows"], r["direction"], r["lse_bytes"]), "extra_bytes", header, "lowest"
    )  # fmt: skip


def features(rows: list[Row]) -> Iterable[str]:
    yield "TFLOP/s of causal attention with one feature each; a window's rate counts what its rows see"
    header = ("dtype", "D", "B", "S", "direction")
    yield beside(
        rows, lambda r: (r["dtype"], r["head_dim"], r["batch"], r["rows"], r["direction"]), "tflops", header, "highest"
    )  # fmt: skip


def errors(rows: list[Row]) -> Iterable[str]:
    yield "root mean square of the error against fp64, relative to the root mean square of what is exact"

    def key(row: Row) -> tuple[str, ...]:
        return row["dtype"], row["head_dim"], kind(row), row["rows"], row["of"]

    yield beside([row for row in rows if not row["refused"]], key, "rms", ("dtype", "D", "mask", "S", "of"), "lowest")


def traffic(rows: list[Row]) -> Iterable[str]:
    yield "bytes to and from HBM"
    total = [{**row, "bytes": str(int(row["bytes_read"]) + int(row["bytes_written"]))} for row in rows]
    yield beside(
        total,
        lambda r: (r["dtype"], kind(r), r["rows"], r["direction"]),
        "bytes",
        ("dtype", "mask", "S", "direction"),
        "lowest",
    )


def cpu(rows: list[Row]) -> Iterable[str]:
    """The CPU suite's own columns: whatever it writes, as one table."""
    skipped = {"suite", "device", "torch", "cuda", "cudnn", "commit", "clocks", "date"}
    header = [column for column in rows[0] if column not in skipped]
    yield markdown(header, [[format_number(row.get(column, "")) for column in header] for row in rows])


def long(rows: list[Row]) -> Iterable[str]:
    def key(row: Row) -> tuple[str, ...]:
        return row["dtype"], row["rows"], f"{row['heads']}/{row['kv_heads']}", row["head_dim"], row["direction"]

    yield "TFLOP/s of one causal sequence, and GiB at the peak of forward and backward with all tensors"
    header = ("dtype", "S", "heads q/kv", "D", "direction")
    yield beside(rows, key, "tflops", header, "highest")
    yield beside(rows, key, "peak_gib", header, "lowest")


def gpt(rows: list[Row]) -> Iterable[str]:
    yield "tokens per second of whole training steps, and GiB at the peak"
    header = ("layers x width", "S", "B", "dtype", "compiled")

    def key(row: Row) -> tuple[str, ...]:
        return f"{row['layers']} x {row['width']}", row["context"], row["batch"], row["dtype"], row["compiled"]

    yield beside(rows, key, "tokens_per_second", header, "highest")
    yield beside(rows, key, "peak_gib", header, "lowest")


TABLES: dict[str, Callable[[list[Row]], Iterable[str]]] = {
    "train": train, "decode": decode, "host": host, "memory": memory, "features": features, "traffic": traffic,
    "cpu": cpu, "errors": errors, "gpt": gpt, "long": long,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--pictures", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args(arguments)
    for suite, rows in read(args.files).items():
        print(f"## {suite}\n\n{origin(rows)}\n")
        for block in TABLES[suite](rows):
            if block:
                print(block + "\n")
        for picture in pictures.draw(suite, rows, args.pictures):
            print(f"![{suite}]({picture.name})\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
