"""Bits that must not depend on threads, repetition, or what else is in the batch."""

from __future__ import annotations

import itertools

import pytest
import torch

from cases import COMBINED, Case, make_inputs
from compare import dtype_name, run_flash

TWO_TYPES = (torch.float32, torch.bfloat16)
SHAPES = [
    Case("square", rows=300, right=0),
    Case("one-head", batch=1, heads=1, rows=400, keys=500, head_dim=32),
    Case("grouped", batch=1, heads=8, kv_heads=1, rows=100, keys=150, head_dim=16),
    Case("decode", batch=1, heads=2, rows=1, keys=5000, head_dim=64),
    *COMBINED,
]
# What a thread count of no divisor of batch * kv_heads cuts into parts: blocks and tiles must stay those of the whole head.
CUT = [
    Case("cut", batch=1, heads=1, rows=1300, keys=1100, head_dim=32),
    Case("cut-causal", batch=1, heads=2, rows=1100, head_dim=64, right=0),
    Case("cut-window", batch=1, heads=3, rows=900, keys=1500, head_dim=32, left=150, right=30, bottom_right=True),
    Case("cut-grouped", batch=1, heads=7, kv_heads=1, rows=900, keys=700, head_dim=32, right=0),
    Case("cut-unseen", batch=1, heads=1, rows=1500, keys=600, head_dim=32, left=100, right=-200),
]


@pytest.mark.parametrize("dtype", TWO_TYPES, ids=dtype_name)
@pytest.mark.parametrize("case", [*SHAPES, *CUT], ids=str)
def test_thread_count(case: Case, dtype: torch.dtype):
    inputs = make_inputs(case, dtype, "cpu")
    expected = None
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        result = run_flash(case, inputs, gradients=True, grad_lse=True)
        expected = expected or result
        for name, tensor in result.items():
            assert torch.equal(tensor, expected[name]), f"{threads} threads: {name}"


@pytest.mark.parametrize("dtype", TWO_TYPES, ids=dtype_name)
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_repetition(case: Case, dtype: torch.dtype, device: str):
    """Forward always; backward under torch's own switch (the poisoning of fresh memory turns it on for the CPU)."""
    inputs = make_inputs(case, dtype, device)
    torch.use_deterministic_algorithms(True)
    try:
        results = [run_flash(case, inputs, gradients=True, grad_lse=True) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for result in results[1:]:
        for name, tensor in result.items():
            assert torch.equal(tensor, results[0][name]), name


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_deterministic_argument(case: Case, device: str):
    """deterministic=True on the call: the same as the global switch, bit for bit, also when asked of backward alone."""
    inputs = make_inputs(case, torch.float32, device)
    leaves = [x.detach().clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    rest = (inputs.mask, inputs.alibi_slopes, inputs.sinks, inputs.seed)

    def gradients(deterministic):
        out, _ = torch.ops.flash.attention_forward(*leaves, *rest, **case.options, deterministic=deterministic)
        return torch.autograd.grad(out, leaves, inputs.grad_out)

    asked = [gradients(True) for _ in range(2)]
    torch.use_deterministic_algorithms(True)
    try:
        switched = gradients(None)
    finally:
        torch.use_deterministic_algorithms(False)
    for other in (asked[1], switched):
        for ours, theirs in zip(asked[0], other, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("rows, keys", [(1, 4096), (40, 300), (200, 1000)])
def test_place_in_the_batch_does_not_matter(rows: int, keys: int, device: str):
    """P4: what a sample gives does not depend on its neighbours or its place among them. (On their number it may: keys are
    split where there are few rows in all.)"""
    query, key, value = (torch.randn(7, 2, size, 32, device=device) for size in (rows, keys, keys))
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4], device=device)
    straight, lse = torch.ops.flash.attention_forward(query, key, value)
    shuffled, shuffled_lse = torch.ops.flash.attention_forward(query[order], key[order], value[order])
    assert torch.equal(shuffled, straight[order]) and torch.equal(shuffled_lse, lse[order])


@pytest.mark.slow
@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["few", "many", "packed"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_a_thousand_runs(head_dim: int, kind: str, cuda: str):
    """P1, Dao-AILab/flash-attention#2244: deterministic gradients stay the same over many runs, with more tiles than multiprocessors,
    of two calls in turns, so that what one leaves behind would show in the other. Many: on Hopper tiles add dQ up one after the other
    (sm90::passes_on)."""
    packed = kind == "packed"
    lengths = [700, 1, 1500, 847] if packed else [1524] * (8 if kind == "many" else 2)
    size = (sum(lengths), 16, head_dim) if packed else (len(lengths), 16, lengths[0], head_dim)
    query, key, value, *grads = (torch.randn(size, device=cuda, dtype=torch.bfloat16) for _ in range(5))
    options = {"window_right": 0, "deterministic": True}
    if packed:
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=cuda)
        where = (starts, starts, max(lengths), max(lengths))
        result = torch.ops.flash.attention_varlen_forward(query, key, value, *where, **options)
        rest, backward = (*where, None, None, None, [True] * 3 + [False]), torch.ops.flash.attention_varlen_backward
    else:
        result = torch.ops.flash.attention_forward(query, key, value, **options)
        rest, backward = (None, None, None, None, [True] * 3 + [False] * 2), torch.ops.flash.attention_backward

    def run(i):
        return backward(grads[i % 2], None, query, key, value, *result, *rest, **options)[:3]

    expected, different = [run(0), run(1)], torch.zeros(3, dtype=torch.bool, device=cuda)
    for i in range(2000):  # compared on the GPU, so that runs follow each other closely
        different |= torch.stack([(ours != theirs).any() for ours, theirs in zip(run(i), expected[i % 2], strict=True)])
    assert different.tolist() == [False] * 3
