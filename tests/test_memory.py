"""Memory grows linearly with the sequence, for every feature.

On the CPU a child process measures how far its resident set rises above what it held before the call; on the GPU the caching
allocator is asked. The scores of these calls would take hundreds of MiB if anyone stored them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

MIB = 1 << 20
LENGTH = 8192
LONG = 16384
HEADS, HEAD_DIM = 2, 16

# name: (rows, dtype, features)
CALLS = {
    "plain-16k": (LONG, "float32", {}),
    "causal-16k-bfloat16": (LONG, "bfloat16", {"window_right": 0}),
    "bool-mask": (LENGTH, "float32", {"mask": "bool"}),
    "float-mask-with-gradient": (LENGTH, "float32", {"mask": "float"}),
    "dropout": (LENGTH, "float32", {"dropout_p": 0.1}),
    "grouped": (LENGTH, "float32", {"kv_heads": 1}),
    "modifiers": (LENGTH, "float32", {"softcap": 5.0, "alibi": True, "sinks": True, "window_left": 5000}),
    "float64": (LENGTH, "float64", {"window_right": 0}),
    "wide-head": (LENGTH // 2, "float32", {"head_dim": 320, "window_right": 0}),
    "packed": (LENGTH, "float32", {"packed": True}),
    "lse-gradient": (LENGTH, "float32", {"window_right": 0, "grad_lse": True}),
}


def prepare(name: str, device: str):
    """(call, bytes of its outputs and gradients, bytes of the gradients in the accumulate type where that is another).

    The call goes forward and backward and keeps everything alive."""
    rows, dtype_name, features = CALLS[name]
    features = dict(features)
    dtype = getattr(torch, dtype_name)
    kv_heads, dim = features.pop("kv_heads", HEADS), features.pop("head_dim", HEAD_DIM)
    packed, grad_lse = features.pop("packed", False), features.pop("grad_lse", False)
    kind = features.pop("mask", None)
    size = (lambda heads: (rows, heads, dim)) if packed else (lambda heads: (1, heads, rows, dim))
    leaves = [torch.randn(size(h), dtype=dtype, device=device, requires_grad=True) for h in (HEADS, kv_heads, kv_heads)]
    options = {}
    if kind is not None:
        mask = torch.randn(1, 1, 1, rows, device=device)
        options["attn_mask"] = mask > -1 if kind == "bool" else mask.requires_grad_()
    if features.pop("alibi", False):
        options["alibi_slopes"] = torch.full((HEADS,), 0.01, device=device)
    if features.pop("sinks", False):
        options["sinks"] = torch.zeros(HEADS, device=device, requires_grad=True)
    if "dropout_p" in features:
        options["seed"] = torch.rand(2, dtype=torch.float64).to(device)
    grad = torch.randn(size(HEADS), device=device).to(dtype)
    lengths = torch.tensor([0, rows // 3, rows], dtype=torch.int32, device=device)
    lse_size = HEADS * rows * (8 if dtype == torch.float64 else 4)
    gradients = sum(x.numel() for x in leaves)
    outputs = (gradients + leaves[0].numel()) * dtype.itemsize + lse_size
    wide = 4 * gradients if dtype.itemsize == 2 else 0

    def call():
        if packed:
            out, lse = torch.ops.flash.attention_varlen_forward(*leaves, lengths, lengths, rows, rows)
        else:
            out, lse = torch.ops.flash.attention_forward(*leaves, **options, **features)
        torch.autograd.backward([out, lse] if grad_lse else [out], [grad, torch.ones_like(lse)] if grad_lse else [grad])
        return out, lse

    return call, outputs, wide


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure_all() -> None:
    """In the child: one line of JSON, {name: [bytes above the start, then what `prepare` says]}."""
    import flash_attn_ext  # noqa: F401

    first = torch.randn(1, HEADS, 64, HEAD_DIM, requires_grad=True)
    out = torch.ops.flash.attention(first, first, first)
    torch.autograd.backward([out], [torch.ones_like(out)])  # torch loads 30 MiB of its own at the first call
    result = {}
    for name in CALLS:
        call, *expected = prepare(name, "cpu")
        Path("/proc/self/clear_refs").write_text("5")  # peak := now
        before = resident("VmRSS")
        kept = call()
        result[name] = [resident("VmHWM") - before, *expected]
        del kept, call
    print(json.dumps(result))


@pytest.fixture(scope="module")
def cpu_memory() -> dict[str, list[int]]:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system cannot reset the peak of a process's resident set")
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), MALLOC_MMAP_THRESHOLD_="65536", OMP_NUM_THREADS="2")
    code = "import test_memory; test_memory.measure_all()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_cpu(name: str, cpu_memory: dict[str, list[int]]):
    """Outputs and gradients, wide sums of narrow gradients, and a fixed scratch per thread; nothing that grows with L * S."""
    extra, outputs, wide = cpu_memory[name]
    scratch = 4 * MIB
    assert extra < outputs + wide + scratch, f"{extra / MIB:.1f} MiB beside {(outputs + wide) / MIB:.1f} MiB"
    rows = CALLS[name][0]
    assert scratch < HEADS * rows * rows * 4 / 16, "the scratch allowed must be small beside the scores"


@pytest.mark.cuda
@pytest.mark.parametrize("name", CALLS)
def test_cuda(name: str, cuda: str):
    """Outputs and gradients, one fp32 dquery and vectors of lse's size."""
    call, outputs, wide = prepare(name, cuda)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    assert extra < 2 * outputs + wide + 4 * MIB, f"{extra / MIB:.1f} MiB beside {(outputs + wide) / MIB:.1f} MiB"
    del kept


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_forward_needs_only_its_outputs(dtype: torch.dtype, cuda: str):
    """Issue 4: forward allocates out and lse, backward at most one fp32 dquery and lse-sized vectors more."""
    leaves = [torch.randn(1, 8, LONG, 128, dtype=dtype, device=cuda, requires_grad=True) for _ in range(3)]
    grad = torch.randn_like(leaves[0])
    size, vector = leaves[0].numel(), 8 * LONG * 4
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = torch.ops.flash.attention_forward(*leaves)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= size * dtype.itemsize + vector + 4 * MIB
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = torch.autograd.grad(out, leaves, grad)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= 3 * size * dtype.itemsize + 4 * size + 4 * vector + 4 * MIB, f"{extra / MIB:.1f} MiB"
    del gradients, lse


@pytest.mark.cuda
def test_grouped_backward_does_not_expand(cuda: str):
    """Q2: 8 query heads a kv head; dkey and dvalue never exist once per query head."""
    query = torch.randn(4, 16, 256, 256, dtype=torch.bfloat16, device=cuda, requires_grad=True)
    key, value = (torch.randn(4, 2, 12288, 256, dtype=torch.bfloat16, device=cuda, requires_grad=True) for _ in range(2))
    out = torch.ops.flash.attention(query, key, value, enable_gqa=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out.sum().backward()
    extra = torch.cuda.max_memory_allocated() - before
    assert extra < 3 * key.numel() * 4 + 4 * query.numel() * 4
