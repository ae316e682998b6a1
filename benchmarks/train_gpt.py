"""Trains a small GPT on real text, the sources of Python's own standard library: losses, tokens per second and memory.

    python -m benchmarks.train_gpt                        # flash_attn_ext; one to two minutes on two CPU cores
    python -m benchmarks.train_gpt --compare              # and torch's SDPA from the same seed, both curves in one picture
    python -m benchmarks.train_gpt --preset 350m --attention ours sdpa-cudnn sdpa-flash --dtype bf16 --compile --steps 40

Every attention trains a model of its own from the same weights on the same batches, so the curves differ by rounding only (without
dropout). They take their steps in turns, in an order that turns around, so that a warm GPU slows all of them alike. A step is timed
whole: batch, forward, backward, clipping, optimizer. Peak memory is what a process that trains this one model alone would see.
"""

import argparse
import csv
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config  # torch itself imports it with the first compilation

from flash_attn_ext._progress import Progress

from . import provenance
from .gpt import ATTENTIONS, CHARACTERS, GPT, library_text, tokens_of

PRESETS = {
    "small": {"layers": 4, "width": 128, "heads": 4, "context": 128, "batch": 16, "characters_per_token": 1},
    "125m": {"layers": 12, "width": 768, "heads": 12, "context": 2048, "batch": 8, "characters_per_token": 2},
    "350m": {"layers": 24, "width": 1024, "heads": 16, "context": 4096, "batch": 8, "characters_per_token": 2},
}
SETTLED = 5  # steps that are not timed: allocation, choice of kernels, compilation


@dataclass
class Result:
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of each settled step
    step_bytes: int = 0  # beyond weights and the optimizer's state; CUDA only
    state_bytes: int = 0
    parameters: int = 0

    def tokens_per_second(self, tokens: int) -> float:
        return tokens / statistics.median(self.seconds) if self.seconds else math.nan


class Training:
    """One attention's model, optimizer and measurements."""

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        torch.manual_seed(args.seed)
        self.args, self.attention, self.result = args, ATTENTIONS[name], Result()
        vocabulary = CHARACTERS**args.characters_per_token
        with torch.device(args.device):
            self.model = GPT(args.layers, args.width, args.heads, args.context, args.dropout, name, vocabulary)
        if args.compile:
            # Its key knows nothing of SDPA's backends: the second of two would get the graph of the first.
            functorch_config.enable_autograd_cache = False
            self.model.compile_blocks()
        fused = args.device == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=fused
        )
        self.result.parameters = sum(parameter.numel() for parameter in self.model.parameters())

    def step(self, number: int, tokens: Tensor, starts: Tensor) -> None:
        """starts [B, 1]: where each sequence of the batch begins in the text."""
        args, cuda = self.args, self.args.device == "cuda"
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        warmup = min(1.0, (number + 1) / max(args.steps // 10, 1))
        for group in self.optimizer.param_groups:
            group["lr"] = args.lr * warmup * (0.55 + 0.45 * math.cos(math.pi * number / args.steps))
        batch = tokens[starts.to(args.device) + torch.arange(args.context + 1, device=args.device)]
        bf16 = torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.dtype == "bf16")
        with self.attention.context(), bf16:
            loss = self.model(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.result.losses.append(float(loss.detach()))  # waits for the device
        if cuda:
            torch.cuda.synchronize()
        if number >= min(SETTLED, args.steps // 2):
            self.result.seconds.append(time.perf_counter() - begin)
            if cuda:
                self.result.step_bytes = max(self.result.step_bytes, torch.cuda.max_memory_allocated() - before)

    def finish(self) -> Result:
        states = [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        self.result.state_bytes = sum(x.nbytes for x in (*self.model.parameters(), *states))
        return self.result


def train(args: argparse.Namespace) -> dict[str, Result]:
    tokens = tokens_of(library_text(args.characters), args.characters_per_token).to(args.device)
    runs = {name: Training(args, name) for name in args.attention}
    millions = next(iter(runs.values())).result.parameters / 1e6
    print(
        f"{', '.join(runs)}: {millions:.1f} M parameters, {args.steps} steps of {args.batch} x {args.context} tokens",
        file=sys.stderr,
    )
    generator = torch.Generator().manual_seed(args.seed)
    progress, deadline = Progress(args.steps), time.monotonic() + args.budget
    for number in range(args.steps):
        if time.monotonic() > deadline:
            print(f"\nbudget spent after {number} steps", file=sys.stderr)
            break
        first = next(iter(runs.values())).result.losses
        progress.step(f"loss {first[-1]:.3f}" if first else "")
        starts = torch.randint(len(tokens) - args.context - 1, (args.batch, 1), generator=generator)
        for run in runs.values() if number % 2 == 0 else reversed(runs.values()):
            run.step(number, tokens, starts)
    progress.close()
    if not next(iter(runs.values())).result.losses:
        sys.exit("the budget was spent before the first step")
    return {name: run.finish() for name, run in runs.items()}


def speed_rows(results: dict[str, Result], args: argparse.Namespace) -> list[dict[str, Any]]:
    """For `python -m benchmarks.report`."""
    sizes = {name: getattr(args, name) for name in ("layers", "width", "heads", "context", "batch")}
    rows = []
    for name, result in results.items():
        milliseconds = f"{statistics.median(result.seconds) * 1e3:.2f}" if result.seconds else ""
        measured = {
            "rival": name, "milliseconds": milliseconds,
            "tokens_per_second": f"{result.tokens_per_second(args.batch * args.context):.0f}" if result.seconds else "",
            "peak_gib": f"{(result.step_bytes + result.state_bytes) / 2**30:.2f}" if args.device == "cuda" else "",
            "steps": len(result.seconds), "first_loss": f"{result.losses[0]:.5f}", "last_loss": f"{result.losses[-1]:.5f}",
        }  # fmt: skip
        kind = {"parameters": result.parameters, "dtype": args.dtype, "compiled": args.compile}
        rows.append({"suite": "gpt", **sizes, **kind, **measured, **provenance.columns(args.device)})
    return rows


def save(results: dict[str, Result], folder: Path, args: argparse.Namespace) -> Path:
    """loss.csv, speed.csv and loss.png, all curves in one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "loss.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *results])
        columns = zip(*(result.losses for result in results.values()), strict=True)
        writer.writerows([step, *losses] for step, losses in enumerate(columns))
    rows = speed_rows(results, args)
    with (folder / "speed.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for (name, result), style in zip(results.items(), ("-", "--", ":", "-.", (0, (1, 3))), strict=False):
        axes.plot(result.losses, style, label=name, linewidth=1.6)
    title = f"GPT, {args.layers} layers, width {args.width}, context {args.context}, {args.dtype}"
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    path = folder / "loss.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_gpt", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--attention", nargs="+", choices=list(ATTENTIONS), default=["ours"])
    parser.add_argument("--compare", action="store_true", help="--attention ours sdpa")
    parser.add_argument("--preset", choices=list(PRESETS), default="small", help="sizes; the flags below override single ones")
    for name in PRESETS["small"]:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no step is begun")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dropout", type=float, default=0.0, help="of the attention weights")
    parser.add_argument("--characters", type=int, default=4_000_000, help="of text, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="bf16: autocast")
    parser.add_argument("--compile", action="store_true", help="torch.compile, block by block")
    parser.add_argument("--out", type=Path, default=Path("train_gpt"), help="folder for loss.csv, speed.csv and loss.png")
    args = parser.parse_args(arguments)
    if args.compare:
        args.attention = ["ours", "sdpa"]
    for name, value in PRESETS[args.preset].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main(arguments: Sequence[str] | None = None) -> dict[str, Result]:
    args = parse(arguments)
    results = train(args)
    for name, result in results.items():
        peak = (result.step_bytes + result.state_bytes) / 2**30
        memory = f", peak {peak:.2f} GiB" if args.device == "cuda" else ""
        speed = result.tokens_per_second(args.batch * args.context)
        print(f"{name}: loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}, {speed:,.0f} tokens/s{memory}")
    first, *others = results.items()
    for name, other in others:
        gap = max(abs(a - b) for a, b in zip(first[1].losses, other.losses, strict=True))
        print(f"largest difference of the curves of {first[0]} and {name}: {gap:.2e}")
    print(f"curve in {save(results, args.out, args)}")
    return results


if __name__ == "__main__":
    main()
