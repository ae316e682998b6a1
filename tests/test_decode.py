"""attention_decode: few query rows over a long cache, contiguous and paged: values, bits, what may not be read, errors."""

from __future__ import annotations

import math

import pytest
import torch

import compare
import flash_attn_ext
from decode_cases import CASES, Call, Case, check


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


@pytest.mark.parametrize("batch, keys", [(1, 40), (1, 9000), (3, 300), (20, 3000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_alone_stays(batch: int, keys: int, dtype: torch.dtype, device: str):
    """Where a row, or one part of its keys, has NaN scores alone, none of them is the largest: the result is NaN all the same."""
    query = torch.randn(batch, 4, 1, 64, device=device, dtype=dtype)
    cache = torch.randn(batch, 4, keys, 64, device=device, dtype=dtype)
    query[0, 1] = math.nan
    cache[-1, 2, :32] = math.nan
    expected = torch.zeros(batch, 4, 1, dtype=torch.bool, device=device)
    expected[0, 1] = expected[-1, 2] = True
    lengths = torch.full((batch,), keys, device=device, dtype=torch.int32)
    for seqlens in (None, lengths):
        for sinks in (None, torch.zeros(4, device=device)):
            out, lse = flash_attn_ext.attention_decode(query, cache, cache, seqlens, sinks=sinks, return_lse=True)
            assert torch.equal(lse.isnan(), expected) and torch.equal(out.isnan().all(-1), expected)
            assert torch.equal(out.isnan().any(-1), expected)


@pytest.mark.parametrize("magnitude", [1e4, 1e15])
def test_huge_scores(magnitude: float, device: str):
    """One key far above the others takes everything."""
    query = torch.full((1, 2, 1, 64), magnitude, device=device, dtype=torch.bfloat16)
    key = torch.randn(1, 1, 300, 64, device=device, dtype=torch.bfloat16)
    key[0, 0, 123] = 100.0
    value = torch.randn_like(key)
    out = flash_attn_ext.attention_decode(query, key, value)
    assert torch.equal(out, value[:, :, 123:124].expand_as(out))


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
