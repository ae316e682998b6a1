"""What is measured: one cell of a benchmark table as a value, and its tensors."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Cell:
    dtype: str
    batch: int
    heads: int
    kv_heads: int
    rows: int
    keys: int
    head_dim: int
    causal: bool
    float_mask: str = "none"  # none; rows: [1, 1, L, S]; full: [B, H, L, S]
    mask_grad: bool = False
    deterministic: bool = False

    def __str__(self) -> str:
        extra = f" mask {self.float_mask}" if self.float_mask != "none" else ""
        return f"{self.dtype} D {self.head_dim} {'causal' if self.causal else 'full'} {self.rows}x{self.keys}{extra}"

    def row(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def forward_flops(self) -> float:
        """4 B H L S D, halved when causal: the convention of every table that this one is compared with."""
        return 4.0 * self.batch * self.heads * self.rows * self.keys * self.head_dim * (0.5 if self.causal else 1.0)

    @property
    def backward_flops(self) -> float:
        return 2.5 * self.forward_flops

    def tensors(self, device: str, requires_grad: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """query, key, value [B, H, S, D] as views of [B, S, H, D] memory, and the mask. Random normal."""

        def normal(length: int, heads: int) -> Tensor:
            memory = torch.randn(self.batch, length, heads, self.head_dim, device=device, dtype=DTYPES[self.dtype])
            return memory.transpose(1, 2).requires_grad_(requires_grad)

        mask = None
        if self.float_mask != "none":
            shape = (1, 1) if self.float_mask == "rows" else (self.batch, self.heads)
            mask = torch.randn(*shape, self.rows, self.keys, device=device, dtype=DTYPES[self.dtype])
            mask.requires_grad_(requires_grad and self.mask_grad)
        return normal(self.rows, self.heads), normal(self.keys, self.kv_heads), normal(self.keys, self.kv_heads), mask


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], choices=list(DTYPES))
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--tokens", type=int, default=16384, help="batch * length (batch is at least 1)")
    parser.add_argument("--width", type=int, default=2048, help="heads * head_dim (heads is at least 1)")
    parser.add_argument("--group", type=int, default=1, help="query heads per key head")
    parser.add_argument("--masks", nargs="+", default=["none", "causal"], choices=["none", "causal"])
    parser.add_argument("--float-masks", nargs="+", default=["none"], choices=["none", "rows", "full"])
    parser.add_argument("--mask-grad", action="store_true", help="float masks require a gradient")
    parser.add_argument("--deterministic", action="store_true", help="deterministic backward, ours and torch's")


def square_cells(args: argparse.Namespace) -> Iterator[Cell]:
    """The cells of design tables: self-attention at a fixed number of tokens and a fixed width."""
    for dtype in args.dtypes:
        for head_dim in args.head_dims:
            for mask in args.masks:
                for float_mask in args.float_masks:
                    for length in args.lengths:
                        heads = max(args.width // head_dim, 1)
                        yield Cell(
                            dtype, max(args.tokens // length, 1), heads, max(heads // args.group, 1), length, length, head_dim,
                            mask == "causal", float_mask, args.mask_grad, args.deterministic,
                        )  # fmt: skip
