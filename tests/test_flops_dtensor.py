"""What torch.utils.flop_counter and torch.distributed.tensor are told, and that nothing is paid before they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flash_attn_ext import attention, attention_decode, attention_varlen
from ranks import run_ranks


def count(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_forward_and_backward_flops():
    query = torch.randn(2, 4, 10, 8, requires_grad=True)
    key, value = torch.randn(2, 2, 12, 8, requires_grad=True), torch.randn(2, 2, 12, 16, requires_grad=True)
    product = 2 * 2 * 4 * 10 * 12  # of one unit of head dim, over the heads of query
    assert count(lambda: attention(query, key, value, causal=True)) == product * (8 + 16)
    assert count(lambda: attention(query, key, value).sum().backward()) == product * (8 + 16 + 3 * 8 + 2 * 16)


def test_packed_flops_count_the_longest_sequence():
    packed = torch.randn(12, 4, 8)
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    product = 2 * 2 * 4 * 7 * 7
    assert count(lambda: attention_varlen(packed, packed, packed, offsets, offsets, 7, 7)) == product * 16
    packed.requires_grad_()
    assert count(lambda: attention_varlen(packed, packed, packed, offsets, offsets, 7, 7).sum().backward()) == product * 56


def test_cached_flops_count_a_full_cache():
    query, cache = torch.randn(3, 4, 1, 8), torch.randn(12, 2, 16, 8)
    lengths, table = torch.zeros(3, dtype=torch.int32), torch.zeros(3, 5, dtype=torch.int32)
    product = 2 * 3 * 4 * (8 + 8)  # over one key
    assert count(lambda: attention_decode(query, cache, cache, lengths, block_table=table)) == product * 5 * 16
    assert count(lambda: attention_decode(query, cache[:3], cache[:3], lengths)) == product * 16
    rows_first = [x.transpose(1, 2).contiguous() for x in (query, cache[:3], cache[:3])]
    assert count(lambda: torch.ops.flash.attention_decode(*rows_first, lengths, rows_first=True)) == product * 16


@pytest.mark.parametrize("order", ["before", "after"])
def test_registered_whichever_is_imported_first(order: str):
    ours, theirs = "import flash_attn_ext", "import torch.utils.flop_counter, torch.distributed.tensor"
    lines = [ours, theirs] if order == "before" else [theirs, ours]
    check = (
        "import sys, torch; from torch.utils.flop_counter import flop_registry; "
        "assert torch.ops.flash.attention_forward in flop_registry; assert 'flash_attn_ext.dtensor' in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-W", "error::UserWarning:flash_attn_ext", "-c", "\n".join([*lines, check])], check=True, cwd="/"
    )


def test_import_alone_pays_for_neither():
    check = "import sys, flash_attn_ext; assert 'torch.distributed.tensor' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, cwd="/")


def sharded(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    tensors = [torch.randn(2, heads, 9, 8, requires_grad=True) for heads in (4, 2, 2)]
    gradient = torch.randn(2, 4, 9, 8)
    expected = attention(*tensors, causal=True)
    expected_gradients = torch.autograd.grad(expected, tensors, gradient)
    for placement in (Replicate(), Shard(0), Shard(1)):
        parts = [distribute_tensor(tensor.detach(), mesh, [placement]).requires_grad_() for tensor in tensors]
        out = attention(*parts, causal=True)
        assert out.placements == (placement,)
        found = torch.autograd.grad(out, parts, distribute_tensor(gradient, mesh, [placement]))
        torch.testing.assert_close(out.full_tensor(), expected)
        torch.testing.assert_close([part.full_tensor() for part in found], list(expected_gradients))
        assert all(part.placements == (placement,) for part in found)
    # One shared head of keys cannot be split: it is gathered, and the result is right all the same.
    query, key, value = (distribute_tensor(tensor.detach(), mesh, [Shard(0)]) for tensor in tensors)
    one = attention(query, key[:, :1], value[:, :1], return_lse=True)[0]
    torch.testing.assert_close(one.full_tensor(), attention(tensors[0], tensors[1][:, :1], tensors[2][:, :1]))
    # A mask broadcast over the batch stays whole; one that is not is split with it.
    for mask in (torch.randn(1, 4, 9, 9), torch.randn(2, 1, 9, 9)):
        whole = distribute_tensor(mask, mesh, [Replicate()])
        masked = attention(query, key, value, whole, return_lse=True)[0]
        torch.testing.assert_close(masked.full_tensor(), attention(*tensors, mask))
    # Which optional arguments there are, and which gradients are wanted, must not be confused with an earlier call.
    for option in ("sinks", "alibi_slopes", "sinks"):
        logits = torch.rand(4)
        out = attention(query, key, value, **{option: distribute_tensor(logits, mesh, [Replicate()])})
        torch.testing.assert_close(out.full_tensor(), attention(*tensors, **{option: logits}))
    (only,) = torch.autograd.grad(attention(*parts, causal=True), parts[1], distribute_tensor(gradient, mesh, [placement]))
    torch.testing.assert_close(only.full_tensor(), expected_gradients[1])
    # Dropout: out is linear in value for a fixed mask, so <gradient, out> = <dvalue, value> only if backward drops the same.
    grad_out = distribute_tensor(gradient, mesh, [placement])
    dropped = attention(*parts, dropout_p=0.4)
    (dvalue,) = torch.autograd.grad(dropped, parts[2], grad_out)
    assert not torch.equal(dropped.full_tensor(), attention(*parts).full_tensor())
    products = [(a * b).sum().full_tensor() for a, b in ((grad_out, dropped), (dvalue, parts[2]))]
    torch.testing.assert_close(*products)


def test_sharded_attention():
    run_ranks(sharded, 2)
