"""Trains a small GPT on characters of real text, the sources of Python's own standard library, and draws the loss.

    python -m benchmarks.train_gpt                        # flash_attn_ext; one to two minutes on two CPU cores
    python -m benchmarks.train_gpt --compare              # and torch's SDPA from the same seed, both curves in one picture
    python -m benchmarks.train_gpt --preset 350m --device cuda --dtype bf16 --compile

Both attentions see the same weights and batches, so their curves differ by rounding only (without dropout).
"""

import argparse
import csv
import math
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flash_attn_ext
from flash_attn_ext._progress import Progress

VOCABULARY = 128  # ASCII
PRESETS = {
    "small": {"layers": 4, "width": 128, "heads": 4, "context": 128, "batch": 16},
    "125m": {"layers": 12, "width": 768, "heads": 12, "context": 2048, "batch": 8},
    "350m": {"layers": 24, "width": 1024, "heads": 16, "context": 2048, "batch": 8},
}
Attention = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def flash(query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> Tensor:
    return flash_attn_ext.attention(query, key, value, dropout_p=dropout_p, causal=True)


def sdpa(query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p, is_causal=True)


ATTENTIONS: dict[str, Attention] = {"flash": flash, "sdpa": sdpa}


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, attention: Attention) -> None:
        super().__init__()
        self.heads, self.dropout, self.attention = heads, dropout, attention
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # [B, S, width]
        packed = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1))  # [B, S, 3, H, D]
        query, key, value = packed.permute(2, 0, 3, 1, 4)  # views [B, H, S, D]: no copy
        mixed = self.attention(query, key, value, self.dropout if self.training else 0.0)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, context: int, dropout: float, attention: Attention) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout, attention) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor) -> Tensor:  # [B, S] -> loss of predicting [B, 1:] from [B, :-1]
        inputs, targets = text[:, :-1], text[:, 1:]
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def library_text(limit: int) -> Tensor:
    """uint8 [characters]: the standard library's modules one after the other, ASCII only."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes().decode("utf-8", "ignore").encode("ascii", "ignore")
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


@dataclass
class Result:
    losses: list[float]
    tokens_per_second: float
    peak_bytes: int | None  # CUDA only


def train(args: argparse.Namespace, name: str) -> Result:
    torch.manual_seed(args.seed)
    model: nn.Module = GPT(args.layers, args.width, args.heads, args.context, args.dropout, ATTENTIONS[name]).to(args.device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{name}: {parameters / 1e6:.1f} M parameters, {args.steps} steps of {args.batch} x {args.context} characters",
        file=sys.stderr,
    )
    run = torch.compile(model) if args.compile else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=args.device == "cuda"
    )
    text = library_text(args.characters).to(args.device)
    generator = torch.Generator().manual_seed(args.seed)
    window = torch.arange(args.context + 1, device=args.device)
    autocast = torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.dtype == "bf16")
    losses: list[Tensor] = []
    progress = Progress(args.steps)
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    settled = min(args.steps // 2, 10)  # compilation and warm-up are not speed
    begin = time.perf_counter()
    for step in range(args.steps):
        if step == settled:
            if args.device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
        shown = f"loss {float(losses[-1]):.3f}" if losses and step % 10 == 0 else ""
        progress.step(f"{name} {shown}")
        warmup = min(1.0, (step + 1) / max(args.steps // 10, 1))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * warmup * (0.55 + 0.45 * math.cos(math.pi * step / args.steps))
        start = torch.randint(len(text) - args.context - 1, (args.batch, 1), generator=generator).to(args.device)
        with autocast:
            loss = run(text[start + window].long())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    final = torch.stack(losses).tolist()  # also waits for the device
    seconds = time.perf_counter() - begin
    progress.close()
    peak = torch.cuda.max_memory_allocated() if args.device == "cuda" else None
    return Result(final, (args.steps - settled) * args.batch * args.context / seconds, peak)


def save(results: dict[str, Result], folder: Path, title: str) -> Path:
    """loss.csv and loss.png, all curves in one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "loss.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *results])
        columns = zip(*(result.losses for result in results.values()), strict=True)
        writer.writerows([step, *losses] for step, losses in enumerate(columns))
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for (name, result), style in zip(results.items(), ("-", "--"), strict=False):
        axes.plot(result.losses, style, label=name, linewidth=1.6)
    axes.set(xlabel="step", ylabel="loss (nats per character)", title=title)
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
    parser.add_argument("--attention", choices=list(ATTENTIONS), default="flash")
    parser.add_argument("--compare", action="store_true", help="train with both attentions")
    parser.add_argument("--preset", choices=list(PRESETS), default="small", help="sizes; the flags below override single ones")
    for name in PRESETS["small"]:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dropout", type=float, default=0.0, help="of the attention weights")
    parser.add_argument("--characters", type=int, default=4_000_000, help="of text, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="bf16: autocast")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("train_gpt"), help="folder for loss.csv and loss.png")
    args = parser.parse_args(arguments)
    for name, value in PRESETS[args.preset].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main(arguments: Sequence[str] | None = None) -> dict[str, Result]:
    args = parse(arguments)
    names = list(ATTENTIONS) if args.compare else [args.attention]
    results = {name: train(args, name) for name in names}
    for name, result in results.items():
        memory = "" if result.peak_bytes is None else f", peak {result.peak_bytes / 2**30:.2f} GiB"
        print(
            f"{name}: loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}, "
            f"{result.tokens_per_second:,.0f} characters/s{memory}"
        )
    if args.compare:
        first, second = (result.losses for result in results.values())
        print(f"largest difference of the two curves: {max(abs(a - b) for a, b in zip(first, second, strict=True)):.2e}")
    title = f"GPT, {args.layers} layers, width {args.width}, context {args.context}, {args.dtype}"
    print(f"curve in {save(results, args.out, title)}")
    return results


if __name__ == "__main__":
    main()
