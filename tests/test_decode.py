"""attention_decode and cache_append_: few query rows over a long cache, contiguous and paged."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import compare
import flash_attn_ext
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


@pytest.mark.parametrize("dtype", compare.DTYPES, ids=compare.dtype_name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(case: Case, dtype: torch.dtype, device: str):
    call = Call(case, dtype, device)
    with compare.poisoned(device):
        result = call.run()
    assert result[0].dtype == dtype and result[0].shape == (*call.query.shape[:3], call.values.shape[3])
    assert result[0].transpose(1, 2).is_contiguous()  # query's order
    check(call, dtype, result)


@pytest.mark.parametrize("name", ["long", "ragged-units", "page-16-long", "group-16", "long-lengths", "rows-40", "all"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=compare.dtype_name)
def test_same_bits_every_time(name: str, dtype: torch.dtype, device: str):
    call = Call(next(case for case in CASES if case.name == name), dtype, device)
    first = call.run()
    for _ in range(5):
        for ours, theirs in zip(call.run(), first, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("page", [None, 1, 7, 16])
def test_append(page: int | None, device: str):
    """New rows land behind each sequence and nowhere else, and are seen."""
    lengths, new, heads, dim = (30, 0, 47, 60), 3, 2, 16
    keys = 64 if page is None else -(-64 // page) * page
    dense = [torch.randn(4, heads, keys, dim, device=device) for _ in range(2)]
    fresh = [torch.randn(4, new, heads, dim, device=device).transpose(1, 2) for _ in range(2)]
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    query = torch.randn(4, 4, new, dim, device=device)
    expected = [x.clone() for x in dense]
    for x, f in zip(expected, fresh, strict=True):
        for b, length in enumerate(lengths):
            x[b, :, length : length + new] = f[b, :, : keys - length]
    table = None
    caches = dense
    if page is not None:
        blocks = keys // page
        table = torch.randperm(4 * blocks).view(4, blocks).to(torch.int32).to(device)
        caches = [torch.empty(4 * blocks, heads, page, dim, device=device) for _ in range(2)]
        for cache, x in zip(caches, dense, strict=True):
            cache[table.long().flatten()] = x.view(4, heads, blocks, page, dim).transpose(1, 2).flatten(0, 1)
    out = flash_attn_ext.attention_decode(
        query, *caches, seqlens, block_table=table, k_new=fresh[0], v_new=fresh[1], causal=True
    )
    if table is not None:
        caches = [c[table.long()].transpose(1, 2).flatten(2, 3) for c in caches]
    for cache, x in zip(caches, expected, strict=True):
        assert torch.equal(cache, x)
    for b, length in enumerate(lengths):
        key, value = (x[b : b + 1, :, : length + new] for x in expected)
        torch.testing.assert_close(
            out[b : b + 1], flash_attn_ext.attention(query[b : b + 1], key, value, causal="bottom_right")
        )


def test_append_without_room(device: str):
    """Rows past the end of the cache are dropped; the rest is written and seen."""
    cache = [torch.zeros(1, 1, 8, 4, device=device) for _ in range(2)]
    fresh = torch.ones(1, 1, 5, 4, device=device)
    seqlens = torch.tensor([6], dtype=torch.int32, device=device)
    torch.ops.flash.cache_append_(*cache, fresh, fresh, seqlens)
    assert cache[0].flatten().tolist() == [0.0] * 24 + [1.0] * 8


@pytest.mark.parametrize("content", [-7, 10**6])
def test_bad_indices_stay_inside(content: int, device: str):
    """Lengths, pages and entries from a bad table are cut to what the cache holds."""
    cache = torch.randn(4, 2, 16, 32, device=device)
    query = torch.randn(2, 2, 1, 32, device=device)
    bad = torch.full((2, 3), content, dtype=torch.int32, device=device)
    out = flash_attn_ext.attention_decode(query, cache, cache, bad[:, 0].contiguous(), block_table=bad)
    assert out.isfinite().all()
    out = flash_attn_ext.attention_decode(query, cache, cache, cache_batch_idx=bad[:, 0].contiguous())
    assert out.isfinite().all()


def test_nan_stays(device: str):
    """A NaN that a row sees makes it NaN, and no other."""
    for dtype in (torch.float32, torch.bfloat16):
        query = torch.randn(3, 2, 1, 64, device=device, dtype=dtype)
        cache = torch.randn(3, 2, 200, 64, device=device, dtype=dtype)
        cache[1, 0, 77, 5] = math.nan
        out, lse = flash_attn_ext.attention_decode(query, cache, cache, return_lse=True)
        expected = torch.zeros(3, 2, 1, dtype=torch.bool, device=device)
        expected[1, 0] = True
        assert torch.equal(lse.isnan(), expected) and torch.equal(out.isnan().all(-1), expected)


@pytest.mark.parametrize("magnitude", [1e4, 1e15])
def test_huge_scores(magnitude: float, device: str):
    """One key far above the others takes everything."""
    query = torch.full((1, 2, 1, 64), magnitude, device=device, dtype=torch.bfloat16)
    key = torch.randn(1, 1, 300, 64, device=device, dtype=torch.bfloat16)
    key[0, 0, 123] = 100.0
    value = torch.randn_like(key)
    out = flash_attn_ext.attention_decode(query, key, value)
    assert torch.equal(out, value[:, :, 123:124].expand_as(out))


def test_autocast(device: str):
    """Queries and new keys follow the cache, which is never converted."""
    cache = torch.zeros(1, 2, 20, 16, device=device, dtype=torch.bfloat16)
    query, fresh = torch.randn(1, 2, 1, 16, device=device), torch.randn(1, 2, 1, 16, device=device)
    lengths = torch.tensor([3], dtype=torch.int32, device=device)
    with torch.autocast(device, torch.bfloat16):
        out = flash_attn_ext.attention_decode(query, cache, cache, lengths, k_new=fresh, v_new=fresh)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(cache[:, :, 3:4].float(), fresh, rtol=1e-2, atol=1e-2)


def test_no_derivative(device: str):
    """Runs inside a graph, and says so when asked for gradients."""
    query = torch.randn(1, 2, 1, 16, device=device, requires_grad=True)
    cache = torch.randn(1, 2, 20, 16, device=device)
    out = flash_attn_ext.attention_decode(query, cache, cache)
    with pytest.raises(RuntimeError, match="attention_decode"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"k_cache": torch.zeros(2, 2, 9)}, "k_cache has 3 dimensions"),
        ({"k_cache": torch.zeros(2, 2, 9, 8)}, "all but the last must be equal"),
        ({"query": torch.zeros(2, 3, 1, 8)}, "must divide the number of heads"),
        ({"query": torch.zeros(3, 4, 1, 8)}, "holds 2 sequences, query 3"),
        ({"query": torch.zeros(2, 4, 1, 16)}, "head_dim"),
        ({"query": torch.zeros(2, 4, 1, 8, dtype=torch.float64)}, "query is Double"),
        ({"cache_seqlens": torch.zeros(2)}, "cache_seqlens is Float: it must be int32"),
        ({"cache_seqlens": torch.zeros(3, dtype=torch.int32)}, r"cache_seqlens has the sizes \[3\]"),
        ({"block_table": torch.zeros(2, 2, dtype=torch.int32)}, "block_table needs cache_seqlens"),
        ({"v_cache": torch.zeros(2, 2, 8, 10).mT}, "a cache is never copied"),
        ({"sinks": torch.zeros(3)}, "sinks has the sizes"),
        ({"softcap": -1.0}, "softcap is -1"),
    ],
)
def test_errors(changes: dict, text: str):
    arguments = {"query": torch.zeros(2, 4, 1, 8), "k_cache": torch.zeros(2, 2, 10, 8), "v_cache": torch.zeros(2, 2, 10, 8)}
    arguments.update(changes)
    with pytest.raises(RuntimeError, match=text):
        flash_attn_ext.attention_decode(**arguments)


def test_new_keys_need_lengths():
    x = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match="must be given together"):
        flash_attn_ext.attention_decode(x, x, x, k_new=x, v_new=x)


@pytest.mark.parametrize("name", ["plain", "all", "batch-idx", "rows-8"])
def test_opcheck(name: str, device: str):
    call = Call(next(case for case in CASES if case.name == name), torch.float32, device)
    options = {"window_left": call.case.left, "window_right": call.case.right, "softcap": call.case.softcap}
    arguments = (call.query, call.keys.nan_to_num(), call.values.nan_to_num(), *call.indices.values(), call.slopes, call.sinks)
    torch.library.opcheck(torch.ops.flash.attention_decode.default, arguments, options)
    fresh = torch.randn(call.query.shape[0], *call.keys.shape[1:2], 2, call.keys.shape[3], device=device)
    seqlens = torch.zeros(fresh.shape[0], dtype=torch.int32, device=device)
    torch.library.opcheck(
        torch.ops.flash.cache_append_.default,
        (call.keys, call.values, fresh, fresh, seqlens, call.indices["block_table"], call.indices["cache_batch_idx"]),
    )


def test_compiled_steps(device: str):
    """A decode step compiles as a whole and leaves the cache as the uncompiled one does."""

    def step(query: Tensor, keys: Tensor, values: Tensor, seqlens: Tensor, fresh: Tensor) -> Tensor:
        return flash_attn_ext.attention_decode(query, keys, values, seqlens, k_new=fresh, v_new=fresh * 2, causal=True) + 1

    query, fresh = torch.randn(2, 4, 1, 32, device=device), torch.randn(2, 2, 1, 32, device=device)
    caches = [[torch.zeros(2, 2, 40, 32, device=device) for _ in range(2)] for _ in range(2)]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for length in (0, 5, 39):
        seqlens = torch.full((2,), length, dtype=torch.int32, device=device)
        torch.testing.assert_close(
            compiled(query, *caches[0], seqlens, fresh), step(query, *caches[1], seqlens, fresh), rtol=0, atol=0
        )
        assert all(torch.equal(a, b) for a, b in zip(*caches, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["long-lengths", "ragged-units", "page-16-long"])
def test_graph_follows_the_lengths(name: str, cuda: str):
    """One capture, replayed while lengths and pages change; several captures of a stream do not disturb each other."""
    call = Call(next(case for case in CASES if case.name == name), torch.bfloat16, cuda)
    call.keys, call.values = call.keys.nan_to_num(), call.values.nan_to_num()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call.run()
    torch.cuda.synchronize()
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            result = call.run()
        graphs.append((graph, result))
    seqlens = call.indices["cache_seqlens"]
    for shift in (0, 40, 5000):
        seqlens.copy_(torch.tensor(call.lengths, device=cuda) - shift)
        expected = call.run()
        for graph, result in graphs:
            for _ in range(2):
                graph.replay()
            torch.cuda.synchronize()
            for ours, theirs in zip(result, expected, strict=True):
                assert torch.equal(ours, theirs)


@pytest.mark.cuda
def test_streams_do_not_disturb_each_other(cuda: str):
    """Calls that add up parts through memory, on several streams at the same time."""
    calls = [Call(next(case for case in CASES if case.name == "ragged-units"), torch.bfloat16, cuda) for _ in range(3)]
    expected = [call.run() for call in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    results: list = []
    for _ in range(20):
        for stream, call in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                results.append(call.run())
    torch.cuda.synchronize()
    for number, result in enumerate(results):
        for ours, theirs in zip(result, expected[number % 3], strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=compare.dtype_name)
@pytest.mark.parametrize(("heads", "kv_heads", "rows"), [(8, 8, 1), (32, 8, 1), (16, 1, 1), (8, 2, 4), (4, 4, 16)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_ordinary_calls_with_few_rows(head_dim: int, heads: int, kv_heads: int, rows: int, dtype: torch.dtype, cuda: str):
    """attention() takes the decode kernels and agrees with those it takes otherwise, gradients included."""
    query = torch.randn(3, rows, heads, head_dim, device=cuda, dtype=dtype).transpose(1, 2).requires_grad_()
    key, value = (torch.randn(3, 777, kv_heads, head_dim, device=cuda, dtype=dtype).transpose(1, 2) for _ in range(2))
    assert "decode" in flash_attn_ext.explain(query, key, value)
    for options in ({}, {"causal": True}, {"causal": "bottom_right", "window": (100, 0)}, {"softcap": 3.0}):
        out, lse = flash_attn_ext.attention(query, key, value, return_lse=True, **options)
        right = 0 if "causal" in options else None
        true, true_lse = reference.attention(
            query.double(), key.double(), value.double(), left=options.get("window", (None,))[0], right=right,
            bottom_right=options.get("causal") == "bottom_right", softcap=options.get("softcap", 0.0),
        )  # fmt: skip
        torch.testing.assert_close(out.double(), true, rtol=2e-2, atol=1e-2 if dtype == torch.bfloat16 else 2e-3)
        torch.testing.assert_close(lse.double(), true_lse, rtol=1e-5, atol=1e-4)
        (ours,) = torch.autograd.grad(out.float().square().sum(), query)
        (theirs,) = torch.autograd.grad(true.square().sum(), query)
        assert (ours - theirs).abs().max() <= 0.05 * theirs.abs().max() + 1e-3
