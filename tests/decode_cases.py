"""Calls of attention_decode: the table of cases, their tensors, and what they should give."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

import compare
import reference


@dataclass(frozen=True)
class Case:
    name: str
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    rows: int = 1
    keys: int = 300  # the most a sequence can have
    head_dim: int = 64
    value_dim: int | None = None
    lengths: tuple[int, ...] | None = None  # None: the cache is full
    page: int | None = None  # None: contiguous
    order: str = "BSHD"  # of the cache in memory
    left: int | None = None
    right: int | None = None
    bottom_right: bool = True
    scale: float | None = None
    softcap: float = 0.0
    alibi: str = ""
    sinks: bool = False
    pad: tuple[int, ...] | None = None
    batch_idx: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return self.name

    def with_(self, **changes) -> Case:
        return dataclasses.replace(self, **changes)


CASES = [
    Case("plain"),
    Case("one-key", keys=1),
    Case("few-keys", keys=15),
    Case("mha", heads=2, kv_heads=2, keys=130),
    Case("mqa", heads=8, kv_heads=1, keys=1000),
    Case("group-16", batch=1, heads=16, kv_heads=1, keys=513),
    Case("group-5", heads=10, kv_heads=2, keys=257),
    Case("group-71", batch=1, heads=71, kv_heads=1, keys=97),
    Case("many-sequences", batch=33, keys=200, lengths=tuple(range(0, 198, 6))),
    Case("long", batch=1, heads=8, kv_heads=2, keys=9000),
    Case("long-lengths", batch=3, heads=8, kv_heads=1, keys=5000, lengths=(5000, 0, 1777)),
    Case("ragged-units", batch=20, heads=8, kv_heads=2, keys=4500, lengths=(4500, 1, 0, 33, 1024, 1025, 2048, *[700] * 13)),
    Case("rows-3", rows=3, right=0, keys=515),
    Case("rows-3-no-mask", rows=3, keys=65),
    Case("rows-8", heads=2, rows=8, right=0, keys=700, lengths=(700, 5)),
    Case("rows-top-left", rows=4, right=0, bottom_right=False, keys=200),
    Case("rows-40", rows=40, heads=6, right=0, keys=333, lengths=(333, 17)),
    *(Case(f"D{d}", head_dim=d, keys=333, heads=6) for d in (8, 24, 64, 80, 96, 128, 136, 192, 256)),
    Case("D128-16-lanes", batch=1, heads=16, kv_heads=1, head_dim=128, keys=1200),
    Case("D128-lengths", batch=4, heads=8, head_dim=128, keys=1000, lengths=(0, 1, 129, 1000)),
    Case("D128-causal", batch=1, heads=64, kv_heads=8, head_dim=128, keys=3072, lengths=(3057,), right=0),
    Case("D256-16-lanes", heads=16, kv_heads=1, head_dim=256, keys=600, rows=2, right=0),
    Case("D60", head_dim=60),
    Case("D320", head_dim=320),
    Case("value-dim", head_dim=128, value_dim=64),
    Case("value-dim-wide", head_dim=72, value_dim=104, keys=100),
    Case("heads-first", order="BHSD", keys=400),
    Case("keys-outer", order="SBHD", keys=100),
    *(Case(f"page-{p}", page=p, keys=p * -(-410 // p), lengths=(410, 37), head_dim=128) for p in (1, 3, 8, 16, 17, 48, 128, 256)),
    Case("page-16-heads-first", page=16, keys=320, lengths=(300, 5), order="BHSD"),
    Case("page-16-long", batch=3, heads=8, page=16, keys=4800, lengths=(4800, 100, 3333), head_dim=128),
    Case("page-16-rings", batch=4, heads=16, page=16, keys=3072, lengths=(3072, 0, 17, 2999), head_dim=128),
    Case("D128-rings", batch=1, heads=16, kv_heads=8, keys=4507, head_dim=128),
    Case("D128-clusters", batch=1, heads=4, kv_heads=1, keys=3005, head_dim=128),
    Case("D128-clusters-of-4", batch=2, heads=16, kv_heads=8, keys=2005, lengths=(2000, 3), head_dim=128),
    Case("page-16-refill", batch=1, heads=8, kv_heads=8, page=16, keys=4512, lengths=(4497,), head_dim=128),
    Case("page-64-units", batch=18, page=64, keys=2560, lengths=(2560, 64, 63, *[1500] * 15)),
    Case("page-1-rows", page=1, keys=200, lengths=(200, 3), rows=4, right=0, left=50),
    Case("window", keys=1000, left=100, right=0),
    Case("window-open-right", keys=1000, left=100, rows=2),
    Case("window-lengths", keys=1000, left=129, right=0, rows=3, lengths=(1000, 130)),
    Case("window-beyond", keys=30, left=1000, right=1000),
    Case("window-sees-nothing", keys=100, left=-5, right=-10),
    Case("rows-see-nothing", rows=6, keys=100, right=0, lengths=(3, 100)),
    Case("softcap", softcap=5.0, scale=1.0),
    Case("scale-negative", scale=-0.3),
    Case("scale-zero", scale=0.0),
    Case("scale-large", scale=300.0),
    Case("alibi", alibi="H", rows=2, right=0, lengths=(300, 77)),
    Case("alibi-batch", alibi="BH"),
    Case("sinks", sinks=True),
    Case("sinks-empty", sinks=True, lengths=(0, 200)),
    Case("pad", pad=(0, 17), rows=2, right=0),
    Case("pad-paged", pad=(33, 290), page=16, keys=304, lengths=(304, 300)),
    Case("pad-everything", pad=(300, 500), lengths=(300, 20)),
    Case("batch-idx", batch=3, batch_idx=(4, 0, 2), lengths=(300, 7, 100)),
    Case(
        "all", batch=3, heads=6, rows=2, keys=800, head_dim=128, page=16, lengths=(800, 33, 400), left=300, right=0, softcap=9.0,
        alibi="BH", sinks=True, pad=(0, 5, 200),
    ),
]  # fmt: skip


class Call:
    """The tensors of a case. What no row may read holds NaN."""

    def __init__(self, case: Case, dtype: torch.dtype, device: str):
        self.case = case
        generator = torch.Generator().manual_seed(1)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

        value_dim = case.value_dim or case.head_dim
        entries = max(case.batch_idx or (case.batch - 1,)) + 1
        page = case.page or case.keys
        blocks = -(-case.keys // page)
        count = case.batch * blocks + 3 if case.page else entries
        sizes = {"B": count, "S": page, "H": case.kv_heads}

        def cache(dim: int) -> Tensor:
            letters = case.order[:3]
            memory = normal(*(sizes[letter] for letter in letters), dim)
            return memory.permute(*(letters.index(letter) for letter in "BHS"), 3)

        keys, values = cache(case.head_dim), cache(value_dim)
        self.query = normal(case.batch, case.rows, case.heads, case.head_dim).transpose(1, 2)
        self.lengths = case.lengths or (case.keys,) * case.batch
        pads = case.pad or (0,) * case.batch
        table = (
            torch.randperm(count, generator=generator)[: case.batch * blocks].view(case.batch, blocks) if case.page else None
        )
        self.dense = []  # (key, value) of each sequence
        hidden = torch.ones(count, page, dtype=torch.bool)
        for b in range(case.batch):
            place = torch.arange(self.lengths[b])
            if table is not None:
                entry, place = table[b][place // page], place % page
            else:
                entry = torch.full_like(place, (case.batch_idx or range(case.batch))[b])
            hidden[entry[pads[b] :], place[pads[b] :]] = False
            self.dense.append([x[entry, :, place].transpose(0, 1).to(device) for x in (keys, values)])
        for x in (keys, values):
            x.masked_fill_(hidden[:, None, :, None], math.nan)
        # masked keys inside a loaded range are seen by no row either
        self.keys, self.values, self.query = keys.to(device), values.to(device), self.query.to(device)

        def indices(x: object) -> Tensor | None:
            return None if x is None else torch.as_tensor(x, dtype=torch.int32).to(device)

        self.indices = {
            "cache_seqlens": indices(self.lengths if case.lengths or case.page else None),
            "block_table": indices(table),
            "cache_batch_idx": indices(case.batch_idx),
            "cache_left_pad": indices(case.pad),
        }
        accumulate = compare.accumulate_type(dtype)
        self.slopes = None
        if case.alibi:
            size = (case.heads,) if case.alibi == "H" else (case.batch, case.heads)
            self.slopes = (0.02 * torch.randn(*size, generator=generator).abs() + 0.01).to(accumulate).to(device)
        self.sinks = torch.randn(case.heads, generator=generator).to(accumulate).to(device) if case.sinks else None

    def run(self) -> tuple[Tensor, Tensor]:
        case = self.case
        return torch.ops.flash.attention_decode(
            self.query, self.keys, self.values, *self.indices.values(), self.slopes, self.sinks, window_left=case.left,
            window_right=case.right, bottom_right=case.bottom_right, scale=case.scale, softcap=case.softcap,
        )  # fmt: skip

    def expected(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        case, outs, lses = self.case, [], []
        for b, (key, value) in enumerate(self.dense):
            pad = case.pad[b] if case.pad else 0
            mask = None
            if pad:
                mask = (torch.arange(self.lengths[b], device=key.device) >= pad)[None, None]
                key, value = (x.masked_fill(~mask[0, 0, :, None], 0.0) for x in (key, value))
            slopes = self.slopes[b] if self.slopes is not None and self.slopes.dim() == 2 else self.slopes
            out, lse = reference.attention(
                self.query[b].to(dtype), key.to(dtype), value.to(dtype), mask=mask, left=case.left, right=case.right,
                bottom_right=case.bottom_right, scale=case.scale, softcap=case.softcap, alibi_slopes=slopes, sinks=self.sinks,
            )  # fmt: skip
            outs.append(out), lses.append(lse)
        return torch.stack(outs), torch.stack(lses)


def check(call: Call, dtype: torch.dtype, result: tuple[Tensor, Tensor]) -> None:
    true, plain = call.expected(torch.float64), call.expected(dtype)
    for name, ours, exact, same in zip(("out", "lse"), result, true, plain, strict=True):
        assert torch.equal(ours.isinf(), exact.isinf()), name
        finite = ~exact.isinf()
        ours, exact, same = (x[finite].double() for x in (ours, exact, same))
        if exact.numel() == 0:
            continue
        # lse is fp32 whatever the dtype of the inputs: plain attention in half types rounds it far more
        least = compare.TINY[dtype] * (1 + exact.abs().max())
        assert (ours - exact).abs().max() <= compare.FORWARD * (same - exact).abs().max() + least, name
