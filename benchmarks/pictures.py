"""Pictures of what the suites measured, one function per suite that has any. Needs matplotlib."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, str]

# One colour per rival in every picture; ours stands out.
COLOURS = {
    "ours": "#d62728", "sdpa-flash": "#1f77b4", "sdpa-cudnn": "#2ca02c", "sdpa-efficient": "#9467bd", "sdpa-math": "#8c564b",
    "standard": "#7f7f7f", "flex": "#bcbd22", "flash_attn": "#17becf", "flash_attn_3": "#ff7f0e", "flash_attn.cute": "#e377c2",
}  # fmt: skip


def _figure(rows: int, columns: int) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=(5.0 * columns, 3.6 * rows), squeeze=False, layout="constrained")


def _lines(axes: Any, rows: Iterable[Row], value: Callable[[Row], float | None]) -> list[tuple[list[int], list[float]]]:
    """One line per rival over the length."""
    points: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        number = value(row)
        if number is not None:
            points.setdefault(row["rival"], []).append((int(row["rows"]), number))
    drawn = []
    for rival, line in points.items():
        lengths, numbers = [list(part) for part in zip(*sorted(line), strict=True)]
        axes.plot(
            lengths,
            numbers,
            marker="o",
            markersize=4,
            linewidth=2.4 if rival == "ours" else 1.4,
            label=rival,
            color=COLOURS.get(rival),
        )
        drawn.append((lengths, numbers))
    ticks = sorted({length for lengths, _ in drawn for length in lengths})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick // 1024}k" if tick % 1024 == 0 else str(tick) for tick in ticks])
    axes.set_xlabel("sequence length")
    axes.grid(alpha=0.3)
    return drawn


def _number(row: Row, column: str) -> float | None:
    return float(row[column]) if row[column] else None


def unique(rows: Iterable[Row], column: str) -> list[str]:
    return list(dict.fromkeys(row[column] for row in rows))


def kind(row: Row) -> str:
    """The mask, and what else sets a cell apart from the plain one."""
    words = ["causal" if row["causal"] == "True" else "none"]
    words += [f"float {row['float_mask']}"] if row["float_mask"] != "none" else []
    words += ["its gradient"] if row["mask_grad"] == "True" else []
    words += ["deterministic"] if row["deterministic"] == "True" else []
    return ", ".join(words)


def train(rows: list[Row]) -> Iterator[tuple[str, Any]]:
    """A grid per dtype and direction: masks down, head dims across; the right axis is the share of the measured GEMM."""
    ceilings = {row["dtype"]: float(row["tflops"]) for row in rows if row["direction"] == "gemm" and row["tflops"]}
    for dtype in unique(rows, "dtype"):
        for direction in ("forward", "backward"):
            chosen = [row for row in rows if row["dtype"] == dtype and row["direction"] == direction]
            if not chosen:
                continue
            kinds, head_dims = list(dict.fromkeys(map(kind, chosen))), unique(chosen, "head_dim")
            figure, grid = _figure(len(kinds), len(head_dims))
            for i, mask in enumerate(kinds):
                for j, head_dim in enumerate(head_dims):
                    axes = grid[i][j]
                    _lines(
                        axes,
                        [r for r in chosen if (kind(r), r["head_dim"]) == (mask, head_dim)],
                        lambda r: _number(r, "tflops"),
                    )
                    axes.set_title(f"{direction}, {dtype}, D {head_dim}, mask {mask}")
                    axes.set_ylabel("TFLOP/s")
                    axes.set_ylim(bottom=0)
                    if ceiling := ceilings.get(dtype):
                        share = axes.secondary_yaxis(
                            "right", functions=(lambda y, c=ceiling: 100 * y / c, lambda p, c=ceiling: p * c / 100)
                        )
                        share.set_ylabel("% of the measured GEMM")
            grid[0][0].legend(fontsize=8)
            yield f"train-{dtype}-{direction}", figure


def memory(rows: list[Row]) -> Iterator[tuple[str, Any]]:
    directions = unique(rows, "direction")
    figure, grid = _figure(1, len(directions))
    for axes, direction in zip(grid[0], directions, strict=True):
        chosen = [row for row in rows if row["direction"] == direction]
        _lines(axes, chosen, lambda r: max(float(r["extra_bytes"]), 1.0) / 2**20 if r["extra_bytes"] else None)
        lengths = sorted({int(row["rows"]) for row in chosen})
        heads, batch = int(chosen[0]["heads"]), int(chosen[0]["batch"])
        scores = [batch * heads * length**2 * 2 / 2**20 for length in lengths]
        axes.plot(lengths, scores, linestyle=":", color="black", label="one 16-bit score matrix per head")
        axes.set_yscale("log", base=2)
        axes.set_ylabel("MiB beyond inputs and results")
        axes.set_title(f"{direction}: peak extra memory")
        axes.legend(fontsize=8)
    yield "memory", figure


def traffic(rows: list[Row]) -> Iterator[tuple[str, Any]]:
    directions = unique(rows, "direction")
    figure, grid = _figure(1, len(directions))
    for axes, direction in zip(grid[0], directions, strict=True):
        chosen = [row for row in rows if row["direction"] == direction]
        _lines(axes, chosen, lambda r: (float(r["bytes_read"]) + float(r["bytes_written"])) / 1e9)
        axes.set_yscale("log")
        axes.set_ylabel("GB to and from HBM")
        axes.set_title(f"{direction}: memory traffic")
        axes.legend(fontsize=8)
    yield "traffic", figure


def gpt(rows: list[Row]) -> Iterator[tuple[str, Any]]:
    """Training: bars of tokens per second for every length and mode, one colour per attention."""
    figure, grid = _figure(1, 1)
    axes = grid[0][0]

    def group(row: Row) -> str:
        return f"{int(row['context']) // 1024}k, {'compiled' if row['compiled'] == 'True' else 'eager'}"

    ordered = sorted(rows, key=lambda row: (row["compiled"], int(row["context"])))
    groups, names = list(dict.fromkeys(map(group, ordered))), unique(rows, "rival")
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        speeds = {group(row): float(row["tokens_per_second"]) / 1e3 for row in rows if row["rival"] == name}
        places = [groups.index(label) + (i - (len(names) - 1) / 2) * width for label in speeds]
        bars = axes.bar(places, list(speeds.values()), width, label=name, color=COLOURS.get(name))
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel("thousand tokens per second")
    axes.set_title(f"training a GPT of {rows[0]['layers']} layers, width {rows[0]['width']}, {rows[0]['dtype']}")
    axes.margins(y=0.2)
    axes.legend(fontsize=8, loc="upper center", ncols=len(names))
    yield "gpt", figure


DRAWN: dict[str, Callable[[list[Row]], Iterator[tuple[str, Any]]]] = {
    "train": train, "memory": memory, "traffic": traffic, "gpt": gpt,
}  # fmt: skip


def draw(suite: str, rows: list[Row], folder: Path) -> Iterator[Path]:
    for name, figure in DRAWN[suite](rows) if suite in DRAWN else ():
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=110)
        yield path
