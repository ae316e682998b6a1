"""Forward and backward on the CPU beside torch's SDPA at equal threads: GFLOP/s, part of the measured FMA peak, ratio, errors."""

import argparse
import ctypes
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__" and not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    __package__ = "benchmarks.suites"

import torch
from torch import Tensor

from .. import provenance, runner
from ..cells import DTYPES, Cell
from ..timing import Call, Stopwatch, interleaved

PEAK_SOURCE = """
typedef float vector __attribute__((vector_size(BYTES)));
float run(long rounds) {  /* 12 sums that do not depend on each other: 2 units times a latency of 4 or 5 */
  vector sum[12], a = {0.5f}, b = {0.5f};
#pragma GCC unroll 12
  for (int i = 0; i < 12; ++i) sum[i] = a;
  for (long r = 0; r < rounds; ++r)
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) { sum[i] = sum[i] * a + b; __asm__("" : "+" CLASS(sum[i])); }
  float total = 0;
#pragma GCC unroll 12
  for (int i = 0; i < 12; ++i) total += sum[i][0];
  return total;
}
"""


class Bar(NamedTuple):
    """A cell and the ratio to torch that the project holds itself to on a core with AVX2 alone and on one with AVX-512."""

    direction: str
    cell: Cell
    avx2: float
    avx512: float


def bars() -> Iterator[Bar]:
    for length in (1024, 4096):
        for dim, avx2, avx512 in ((64, 1.25, 1.20), (128, 1.15, 1.10)):
            yield Bar("forward", Cell("fp32", 1, 4, 4, length, length, dim, False), avx2, avx512)
        for dim, avx2, avx512 in ((64, 1.15, 1.15), (128, 1.05, 1.08)):
            yield Bar("backward", Cell("fp32", 1, 4, 4, length, length, dim, False), avx2, avx512)
    for dim in (64, 128):
        for length, avx2, avx512 in ((512, 1.8, 2.0), (1024, 1.5, 1.5), (2048, 1.3, 1.25)):
            yield Bar("forward", Cell("fp32", 1, 4, 4, length, length, dim, True), avx2, avx512)
        yield Bar("backward", Cell("fp32", 1, 4, 4, 1024, 1024, dim, True), 1.4, 1.5)
    for dtype, forward512, backward512 in (("bf16", 1.9, 1.9), ("fp16", 1.15, 1.3)):
        for dim in (64, 128):
            yield Bar("forward", Cell(dtype, 1, 4, 4, 1024, 1024, dim, False), 1.2, forward512)
            yield Bar("backward", Cell(dtype, 1, 4, 4, 512, 512, dim, False), 5.0, backward512)
    for dtype in ("fp32", "bf16", "fp16"):
        yield Bar("forward", Cell(dtype, 1, 1, 1, 1, 32768, 128, False), 1.3, 1.3)
        yield Bar("forward", Cell(dtype, 1, 8, 1, 1, 32768, 128, False), 2.0, 2.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, os.cpu_count() or 1}))
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16", "fp16"], choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--directions", nargs="+", default=["forward", "backward"], choices=["forward", "backward"])
    parser.add_argument("--no-errors", action="store_true", help="skip the comparison with fp64")


def instruction_set() -> str:
    """What the library runs: "avx2"."""
    import flash_attn_ext

    line = flash_attn_ext.explain(*(torch.zeros(1, 1, 1, 8) for _ in range(3)))
    return next((name for name in ("amx", "avx512_bf16", "avx512", "avx2", "portable") if name in line), "")


def fma_peak() -> float:
    """GFLOP/s of one core on independent multiply-adds as wide as the library's; 0 without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    width = {"amx": 64, "avx512_bf16": 64, "avx512": 64, "avx2": 32}.get(instruction_set(), 16)
    if compiler is None or os.uname().machine != "x86_64":
        return 0.0
    flags = {64: ["-mavx512f", "-mfma"], 32: ["-mavx2", "-mfma"], 16: []}[width]
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "peak.c"), Path(folder, "peak.so")
        source.write_text(PEAK_SOURCE.replace("BYTES", str(width)).replace("CLASS", '"v"' if width == 64 else '"x"'))
        command = [compiler, "-O2", "-ffp-contract=fast", *flags, "-shared", "-fPIC", str(source), "-o", str(library)]
        if subprocess.run(command, capture_output=True).returncode != 0:
            return 0.0
        function = ctypes.CDLL(str(library)).run
    best, rounds = 0.0, 200_000
    for _ in range(50):
        begin = time.perf_counter()
        function(ctypes.c_long(rounds))
        best = max(best, rounds * 12 * (width // 4) * 2 / (time.perf_counter() - begin) / 1e9)
    return best


def _forward(cell: Cell, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Callable[[], Any]]:
    def ours() -> Any:
        gqa = cell.heads != cell.kv_heads
        return torch.ops.flash.attention(query, key, value, None, 0.0, cell.causal, enable_gqa=gqa)

    def theirs() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=cell.causal, enable_gqa=cell.heads != cell.kv_heads
        )

    return {"ours": ours, "torch": theirs}


def _backward(cell: Cell, query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> dict[str, Callable[[], Any]]:
    flash, aten = torch.ops.flash, torch.ops.aten
    right = 0 if cell.causal else None
    out, lse = flash.attention_forward(query, key, value, window_right=right)
    their_out, their_lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, cell.causal)

    def ours() -> Any:
        nothing = (None, None, None, None)
        wanted = [True, True, True, False, False]
        return flash.attention_backward(grad, None, query, key, value, out, lse, *nothing, wanted, window_right=right)[:3]

    def theirs() -> Any:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, their_out, their_lse, 0.0, cell.causal
        )

    return {"ours": ours, "torch": theirs}


def _exact(cell: Cell, direction: str, *tensors: Tensor) -> list[Tensor]:
    """The last head's results in fp64: out, or dquery, dkey, dvalue."""
    query, key, value, grad = (tensor[0, -1].double() for tensor in tensors)
    query, key, value = (tensor.requires_grad_(direction == "backward") for tensor in (query, key, value))
    score = query @ key.T / math.sqrt(cell.head_dim)
    if cell.causal:
        score = score.masked_fill(torch.ones(cell.rows, cell.keys, dtype=torch.bool).triu(1), -math.inf)
    out = score.softmax(-1) @ value
    return list(torch.autograd.grad(out, (query, key, value), grad)) if direction == "backward" else [out]


def _error(results: Any, exact: list[Tensor]) -> float:
    """Largest relative root mean square over the results."""
    results = [results] if isinstance(results, Tensor) else results
    return max(
        float((result[0, -1].double() - right).square().mean().sqrt() / right.square().mean().sqrt())
        for result, right in zip(results, exact, strict=True)
    )


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    peak, isa = fma_peak(), instruction_set()
    print(f"{provenance.processor()}; {isa}; threads {args.threads}; FMA peak of a core {peak:.1f} GFLOP/s", file=sys.stderr)
    todo = [
        (threads, bar)
        for threads in args.threads
        for bar in bars()
        if bar.cell.dtype in args.dtypes and bar.direction in args.directions
    ]
    for (threads, bar), seconds in runner.walk(todo, args.budget, lambda item: f"{item[0]} {item[1].direction} {item[1].cell}"):
        torch.set_num_threads(threads)
        cell, direction = bar.cell, bar.direction
        shapes = ((cell.heads, cell.rows), (cell.kv_heads, cell.keys), (cell.kv_heads, cell.keys), (cell.heads, cell.rows))
        tensors = [torch.randn(1, heads, length, cell.head_dim).to(DTYPES[cell.dtype]) for heads, length in shapes]
        functions = _forward(cell, *tensors[:3]) if direction == "forward" else _backward(cell, *tensors)
        calls = {name: Call(function) for name, function in functions.items()}
        with torch.no_grad():
            interleaved(calls, Stopwatch("cpu"), args.rounds, seconds)
            errors = {"ours": "", "torch": ""}
            if not args.no_errors and cell.rows <= 2048 and threads == args.threads[0]:
                with torch.enable_grad():
                    exact = _exact(cell, direction, *tensors)
                errors = {name: f"{_error(function(), exact):.2e}" for name, function in functions.items()}
        pairs = cell.rows * (cell.rows + 1) / 2 if cell.causal else cell.rows * cell.keys
        flops = 4.0 * cell.heads * pairs * cell.head_dim * (2.5 if direction == "backward" else 1.0)
        rate = {name: flops / (call.median or math.inf) / 1e9 for name, call in calls.items()}
        yield {
            "direction": direction, "dtype": cell.dtype, "heads": f"{cell.heads}/{cell.kv_heads}", "rows": cell.rows,
            "keys": cell.keys, "head_dim": cell.head_dim, "causal": cell.causal, "threads": threads, "isa": isa,
            "torch_isa": torch.backends.cpu.get_cpu_capability(),
            "ours_gflops": f"{rate['ours']:.2f}", "torch_gflops": f"{rate['torch']:.2f}",
            "ratio": f"{rate['ours'] / rate['torch']:.3f}" if rate["torch"] else "",
            "ratio_of_minima": f"{min(calls['torch'].seconds) / min(calls['ours'].seconds):.3f}",
            "bar": bar.avx512 if isa.startswith(("amx", "avx512")) else bar.avx2,
            "percent_of_peak": f"{100 * rate['ours'] / (peak * threads):.1f}" if peak else "",
            "ours_error": errors["ours"], "torch_error": errors["torch"], "calls": len(calls["ours"].seconds),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds that the suite may take")
    parser.add_argument("--rounds", type=int, default=50, help="rounds over both, at most, per cell")
    add_arguments(parser)
    for row in run(parser.parse_args()):
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
