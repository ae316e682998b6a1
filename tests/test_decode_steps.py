"""attention_decode as programs use it: caches that grow in place, autocast, torch.compile, CUDA graphs and streams, SDPA's own calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import compare
import flash_attn_ext
import reference
from decode_cases import CASES, Call


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


def test_autocast(device: str):
    """Queries and new keys follow the cache, which is never converted."""
    cache = torch.zeros(1, 2, 20, 16, device=device, dtype=torch.bfloat16)
    query, fresh = torch.randn(1, 2, 1, 16, device=device), torch.randn(1, 2, 1, 16, device=device)
    lengths = torch.tensor([3], dtype=torch.int32, device=device)
    with torch.autocast(device, torch.bfloat16):
        out = flash_attn_ext.attention_decode(query, cache, cache, lengths, k_new=fresh, v_new=fresh)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(cache[:, :, 3:4].float(), fresh, rtol=1e-2, atol=1e-2)


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


@pytest.mark.parametrize("name", ["plain", "all", "batch-idx", "rows-8"])
def test_rows_first(name: str, device: str):
    """The same of [B, L, H, E] tensors, without a view: values, memory order, shapes of fake tensors, errors."""
    call = Call(next(case for case in CASES if case.name == name), torch.float32, device)
    expected = call.run()
    call.query, call.keys, call.values = (x.transpose(1, 2).contiguous() for x in (call.query, call.keys, call.values))
    case = call.case
    arguments = (call.query, call.keys, call.values, *call.indices.values(), call.slopes, call.sinks)
    options = {
        "window_left": case.left, "window_right": case.right, "bottom_right": case.bottom_right, "scale": case.scale,
        "softcap": case.softcap, "rows_first": True,
    }  # fmt: skip
    out, lse = torch.ops.flash.attention_decode(*arguments, **options)
    assert out.is_contiguous() and torch.equal(out.transpose(1, 2), expected[0]) and torch.equal(lse, expected[1])
    clean = (call.query, call.keys.nan_to_num(), call.values.nan_to_num(), *arguments[3:])
    torch.library.opcheck(torch.ops.flash.attention_decode.default, clean, options)
    fresh = torch.randn(call.query.shape[0], 2, call.keys.shape[2], call.keys.shape[3], device=device)
    seqlens = torch.zeros(fresh.shape[0], dtype=torch.int32, device=device)
    index = (seqlens, call.indices["block_table"], call.indices["cache_batch_idx"])
    caches = [x.transpose(1, 2).contiguous() for x in (call.keys, call.values)]
    torch.ops.flash.cache_append_(call.keys, call.values, fresh, fresh, *index, rows_first=True)
    torch.ops.flash.cache_append_(*caches, *(fresh.transpose(1, 2),) * 2, *index)
    for ours, theirs in zip((call.keys, call.values), caches, strict=True):
        torch.testing.assert_close(ours.transpose(1, 2), theirs, rtol=0, atol=0, equal_nan=True)
    torch.library.opcheck(
        torch.ops.flash.cache_append_.default, (call.keys, call.values, fresh, fresh, *index), {"rows_first": True}
    )
    with pytest.raises(RuntimeError, match="query has 3 dimensions"):
        torch.ops.flash.attention_decode(call.query[0], *arguments[1:3], rows_first=True)


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


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=compare.dtype_name)
@pytest.mark.parametrize("page", [None, 16, 48])
@pytest.mark.parametrize(
    ("batch", "kv_heads", "keys"), [(1, 8, 1024), (1, 8, 40000), (2, 8, 20000), (1, 1, 30000), (1, 3, 9000), (1, 8, 131072)]
)
def test_instances_agree(batch: int, kv_heads: int, keys: int, page: int | None, dtype: torch.dtype, cuda: str):
    """Calls of one query row without options have instances of their own. An option that changes nothing leads to the others."""
    size = page or keys
    blocks = -(-keys // size)
    key, value = (torch.randn(batch * blocks, size, kv_heads, 128, device=cuda, dtype=dtype).transpose(1, 2) for _ in range(2))
    query = torch.randn(batch, 4 * kv_heads, 1, 128, device=cuda, dtype=dtype)
    table = torch.randperm(batch * blocks, device=cuda).view(batch, blocks).int() if page else None
    nothing = torch.zeros(batch, device=cuda, dtype=torch.int32)
    for length in (keys, keys - 77, keys // 3, 5):
        block, rest = divmod(length, size)
        if rest:
            last = table[:, block].long() if table is not None else torch.arange(batch, device=cuda)
            for cache in (key, value):
                cache[last, :, rest:] = torch.nan
        lengths = nothing + length
        ours = flash_attn_ext.attention_decode(query, key, value, lengths, block_table=table, return_lse=True)
        others = flash_attn_ext.attention_decode(
            query, key, value, lengths, block_table=table, cache_left_pad=nothing, return_lse=True
        )  # fmt: skip
        largest = float(others[0].abs().max())
        torch.testing.assert_close(ours[0], others[0], rtol=1e-2, atol=1e-3 * largest)
        torch.testing.assert_close(ours[1], others[1], rtol=1e-6, atol=1e-6)
