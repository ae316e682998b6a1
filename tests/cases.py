"""The one table of shapes and options that the tests run over."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

# Sizes around the borders of every tile and vector width in use.
SIZES = (1, 7, 16, 17, 63, 64, 65, 127, 129, 200)


@dataclass(frozen=True, kw_only=True)
class Modifiers:
    """What a dense and a packed call have in common beside sizes."""

    left: int | None = None
    right: int | None = None
    bottom_right: bool = False
    softcap: float = 0.0
    alibi: str = ""  # "", "H" or "BH"
    sinks: bool = False
    dropout_p: float = 0.0

    @property
    def options(self) -> dict:
        """The keyword options of torch.ops.flash.attention_forward and attention_varlen_forward."""
        return {
            "window_left": self.left,
            "window_right": self.right,
            "bottom_right": self.bottom_right,
            "softcap": self.softcap,
            "dropout_p": self.dropout_p,
        }


@dataclass(frozen=True)
class Case(Modifiers):
    """One dense call. `mask` is e.g. "float:1HLS": dtype kind (float, same, bool), then the sizes, 1 = broadcast."""

    name: str
    batch: int = 2
    heads: int = 2
    kv_heads: int | None = None  # None: as heads
    rows: int = 65
    keys: int | None = None  # None: as rows
    head_dim: int = 64
    value_dim: int | None = None  # None: as head_dim
    scale: float | None = None
    mask: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def options(self) -> dict:
        return super().options | {"scale": self.scale}

    def with_(self, **changes) -> Case:
        return dataclasses.replace(self, **changes)


@dataclass
class Inputs:
    query: Tensor  # [batch, heads, rows, head_dim]
    key: Tensor  # [batch, kv_heads, keys, head_dim]
    value: Tensor  # [batch, kv_heads, keys, value_dim]
    mask: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    seed: Tensor | None
    grad_out: Tensor  # [batch, heads, rows, value_dim]
    grad_lse: Tensor  # [batch, heads, rows]


def make_inputs(case: Case, dtype: torch.dtype, device: str, random_seed: int = 0) -> Inputs:
    """Random normal inputs, drawn on the CPU in fp64: every dtype and device sees the same numbers."""
    generator = torch.Generator().manual_seed(random_seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    keys = case.rows if case.keys is None else case.keys
    kv_heads = case.heads if case.kv_heads is None else case.kv_heads
    value_dim = case.head_dim if case.value_dim is None else case.value_dim
    mask = None
    if case.mask:
        kind, sizes = case.mask.split(":")
        full = (case.batch, case.heads, case.rows, keys)
        size = [1 if letter == "1" else full[len(full) - len(sizes) + place] for place, letter in enumerate(sizes)]
        mask = normal(*size) > -0.7 if kind == "bool" else normal(*size)
        if kind != "bool":
            mask = mask.to(accumulate if kind == "float" else dtype)
        mask = mask.reshape((1,) * (4 - len(size)) + tuple(size)).to(device)
    slopes = None
    if case.alibi:
        size = (case.heads,) if case.alibi == "H" else (case.batch, case.heads)
        slopes = (0.02 * normal(*size).abs() + 0.01).to(accumulate).to(device)
    return Inputs(
        query=normal(case.batch, case.heads, case.rows, case.head_dim).to(dtype).to(device),
        key=normal(case.batch, kv_heads, keys, case.head_dim).to(dtype).to(device),
        value=normal(case.batch, kv_heads, keys, value_dim).to(dtype).to(device),
        mask=mask,
        alibi_slopes=slopes,
        sinks=normal(case.heads).to(accumulate).to(device) if case.sinks else None,
        seed=torch.rand(2, generator=generator, dtype=torch.float64).to(device) if case.dropout_p > 0 else None,
        grad_out=normal(case.batch, case.heads, case.rows, value_dim).to(dtype).to(device),
        grad_lse=normal(case.batch, case.heads, case.rows).to(accumulate).to(device),
    )


def rows_first(
    device: str, rows: int = 33, keys: int | None = None, batch: int = 2, heads: int = 4, kv_heads: int = 2, head_dim: int = 16
) -> list[Tensor]:
    """query, key, value [batch, heads, rows, head_dim] as models have them: views of [batch, rows, heads, head_dim] memory."""
    keys = rows if keys is None else keys
    return [
        torch.randn(batch, size, h, head_dim, device=device).transpose(1, 2).requires_grad_()
        for h, size in ((heads, rows), (kv_heads, keys), (kv_heads, keys))
    ]


# Lengths: every size once as rows and once as keys, never the same pair of remainders twice.
LENGTHS = [
    Case(f"L{rows}-S{keys}", rows=rows, keys=keys, head_dim=32)
    for rows, keys in zip(SIZES, (65, 1, 200, 16, 129, 64, 17, 63, 7, 127), strict=True)
]

# Head dims: below, at and above every bucket; odd ones; value wider and narrower.
HEAD_DIMS = [
    Case(f"E{head_dim}-Ev{value_dim}", batch=1, rows=33, keys=70, head_dim=head_dim, value_dim=value_dim, right=20)
    for head_dim, value_dim in (
        *((d, d) for d in (1, 3, 5, 8, 12, 16, 31, 60, 80, 96, 100, 128, 130, 160, 192, 250, 256, 257, 320, 512)),
        *((8, 16), (16, 8), (128, 64), (64, 128), (192, 128), (576, 512), (40, 1), (1, 40)),
    )
]

# Grouped heads.
GROUPED = [
    Case("mqa", heads=4, kv_heads=1),
    Case("gqa", heads=6, kv_heads=2, rows=17, keys=130, head_dim=40),
    Case("gqa-causal", heads=6, kv_heads=3, rows=130, right=0),
    Case("gqa-window", heads=12, kv_heads=1, rows=150, left=63, right=0, head_dim=16),
]

# Interval masks: both alignments, rows that see nothing at either end.
INTERVALS = [
    Case("causal", rows=129, right=0),
    Case("causal-wide", rows=65, keys=200, right=0),
    Case("causal-tall", rows=200, keys=65, right=0),
    Case("bottom-right-wide", rows=65, keys=200, right=0, bottom_right=True),
    Case("bottom-right-tall", rows=200, keys=65, right=0, bottom_right=True),
    Case("window", rows=130, left=17, right=5),
    Case("window-zero", rows=70, left=0, right=0),
    Case("window-left-only", rows=130, left=64),
    Case("window-bottom-right", rows=70, keys=129, left=16, right=0, bottom_right=True),
    Case("window-short-keys", rows=129, keys=40, left=32, right=64),
    Case("window-beyond", rows=20, keys=30, left=1000, right=1000),
    Case("window-shifted-left", rows=100, keys=100, left=40, right=-10),
    Case("window-shifted-right", rows=100, keys=100, left=-10, right=40),
    Case("window-sees-nothing", rows=40, keys=40, left=-5, right=-10),
]

# Masks of every broadcast shape.
MASKS = [
    Case(f"{kind}-{sizes}", heads=4, kv_heads=2, rows=37, keys=70, head_dim=16, mask=f"{kind}:{sizes}")
    for kind, sizes in (
        ("float", "BHLS"), ("float", "LS"), ("float", "1HLS"), ("float", "B11S"), ("float", "B1LS"), ("float", "BHL1"),
        ("float", "BH1S"), ("float", "1111"), ("float", "S"), ("same", "BHLS"), ("same", "11LS"), ("same", "B1L1"),
        ("bool", "BHLS"), ("bool", "LS"), ("bool", "B11S"), ("bool", "1HLS"), ("bool", "BHL1"), ("bool", "S"),
    )
]  # fmt: skip

MODIFIERS = [
    Case("scale", scale=0.3),
    Case("scale-negative", scale=-0.3),
    Case("scale-zero", scale=0.0, right=0),
    Case("softcap", softcap=5.0),
    Case("softcap-tight", softcap=0.5, scale=1.0, right=0),
    Case("alibi", alibi="H", rows=129),
    Case("alibi-batch", alibi="BH", rows=50, keys=90, bottom_right=True),
    Case("alibi-causal", alibi="H", rows=90, keys=50, right=0),
    Case("sinks", sinks=True),
    Case("sinks-window", sinks=True, rows=129, left=16, right=0, heads=4, kv_heads=2),
    Case("sinks-empty-rows", sinks=True, rows=70, keys=30, right=0, bottom_right=True),
    Case("dropout", dropout_p=0.3),
    Case("dropout-causal", dropout_p=0.5, rows=200, right=0, head_dim=32),
    Case("dropout-heavy", dropout_p=0.9, rows=17, keys=129),
    Case("dropout-all", dropout_p=1.0, rows=17),
]

# Everything at once: features must not disturb each other.
COMBINED = [
    Case(
        "all-top-left", batch=2, heads=6, kv_heads=2, rows=130, keys=77, head_dim=40, value_dim=24, left=90, right=10,
        scale=0.2, softcap=3.0, alibi="BH", sinks=True, mask="float:B1LS", dropout_p=0.2,
    ),
    Case(
        "all-bottom-right", batch=2, heads=4, kv_heads=1, rows=66, keys=200, head_dim=64, left=150, right=3,
        bottom_right=True, softcap=8.0, alibi="H", sinks=True, mask="same:1HLS", dropout_p=0.1,
    ),
    Case("all-bool", heads=4, kv_heads=2, rows=70, keys=70, right=0, softcap=4.0, alibi="H", mask="bool:B1LS"),
    Case("bool-causal-dropout", rows=127, right=0, mask="bool:B11S", dropout_p=0.25),
]  # fmt: skip

DENSE = LENGTHS + HEAD_DIMS + GROUPED + INTERVALS + MASKS + MODIFIERS + COMBINED


@dataclass(frozen=True)
class Packed(Modifiers):
    """One call over packed sequences."""

    name: str
    rows: tuple[int, ...]  # length of each query sequence
    keys: tuple[int, ...] | None = None  # None: as rows
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    value_dim: int | None = None
    tail: int = 0  # rows and keys past the last sequence, filled with NaN by the tests
    bottom_right: bool = dataclasses.field(default=True, kw_only=True)

    def __str__(self) -> str:
        return self.name


PACKED = [
    Packed("one", (65,)),
    Packed("several", (1, 7, 63, 64, 65, 130)),
    Packed("cross", (17, 64, 3, 129), (65, 1, 200, 16)),
    Packed("causal", (33, 64, 100), (70, 64, 20), right=0),
    Packed("causal-top-left", (33, 64, 100), (70, 64, 20), right=0, bottom_right=False),
    Packed("window", (100, 31, 200), left=16, right=4),
    Packed("empty-sequences", (0, 5, 0, 70, 0), (3, 0, 0, 90, 4), right=0),
    Packed("decode", (0, 1, 0, 1), (0, 3, 0, 5), heads=9, kv_heads=3, head_dim=64, right=0),
    Packed("wide-head", (0, 0, 40, 28, 0), (17, 58, 28, 97, 1), heads=4, kv_heads=1, head_dim=256),
    Packed("tail", (20, 30), (33, 7), tail=17, right=0),
    Packed("tail-sinks", (20, 30), (33, 7), tail=17, sinks=True, dropout_p=0.1),
    Packed("all-empty", (0, 0), (0, 0), tail=5),
    Packed("value-dim", (9, 65), (65, 9), head_dim=24, value_dim=40),
    Packed("features", (30, 90, 1), (60, 40, 77), left=50, right=2, softcap=4.0, alibi="BH", sinks=True, dropout_p=0.2),
    Packed("alibi-shared", (30, 90), alibi="H", right=0),
    Packed("dropout", (128, 17), (17, 128), dropout_p=0.4),
]
