"""What train_gpt trains: a GPT-2 with a choice of attention, and the text it reads, the sources of Python's standard library."""

import sysconfig
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn_ext

CHARACTERS = 128  # ASCII


def _ours(query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> Tensor:
    return flash_attn_ext.attention(query, key, value, dropout_p=dropout_p, causal=True)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p, is_causal=True)


@dataclass(frozen=True)
class Attention:
    function: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    backend: SDPBackend | None = None

    def context(self) -> AbstractContextManager[object]:
        """Around a forward pass: torch's choice of a backend."""
        return nullcontext() if self.backend is None else sdpa_kernel(self.backend)


ATTENTIONS = {
    "ours": Attention(_ours),
    "sdpa": Attention(_sdpa),
    "sdpa-flash": Attention(_sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": Attention(_sdpa, SDPBackend.CUDNN_ATTENTION),
    "sdpa-efficient": Attention(_sdpa, SDPBackend.EFFICIENT_ATTENTION),
}


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, attention: str) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention = attention  # the name and not the function: torch.compile then keeps a graph for each
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # [B, S, width]
        packed = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1))  # [B, S, 3, H, D]
        query, key, value = packed.permute(2, 0, 3, 1, 4)  # views [B, H, S, D]: no copy
        mixed = ATTENTIONS[self.attention].function(query, key, value, self.dropout if self.training else 0.0)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    def __init__(
        self, layers: int, width: int, heads: int, context: int, dropout: float, attention: str, vocabulary: int
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout, attention) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor) -> Tensor:  # [B, S + 1] -> loss of predicting [B, 1:] from [B, :-1]
        inputs, targets = text[:, :-1], text[:, 1:]
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def compile_blocks(self, **options: Any) -> None:
        """All layers share one compiled graph: seconds to compile, whatever the depth. options: of torch.compile."""
        for block in self.blocks:
            block.compile(dynamic=False, **options)


def library_text(limit: int) -> Tensor:
    """uint8 [characters]: the standard library's modules one after the other, ASCII only."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes().decode("utf-8", "ignore").encode("ascii", "ignore")
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def tokens_of(text: Tensor, characters: int) -> Tensor:
    """int64 [tokens], each of so many characters in a row: CHARACTERS ** characters different ones."""
    whole = text[: len(text) // characters * characters].long().view(-1, characters)
    return (whole * CHARACTERS ** torch.arange(characters)).sum(1)
