"""CUDA graphs, streams and devices."""

from __future__ import annotations

import threading

import pytest
import torch

from cases import Case, make_inputs

pytestmark = pytest.mark.cuda
forward = torch.ops.flash.attention_forward
attention = torch.ops.flash.attention

CAPTURED = [
    Case("plain", rows=200, right=0),
    Case("grouped-wide", heads=4, kv_heads=1, rows=130, head_dim=256),
    Case("decode", batch=1, heads=8, kv_heads=2, rows=1, keys=8192, head_dim=128),
    Case("mask", rows=65, mask="same:B1LS"),
    Case("modifiers", rows=100, softcap=4.0, alibi="H", sinks=True, left=50),
]


def leaves_of(case: Case, device: str, dtype: torch.dtype = torch.bfloat16):
    inputs = make_inputs(case, dtype, device)
    leaves = [inputs.query, inputs.key, inputs.value]
    leaves += [x for x in (inputs.mask, inputs.sinks) if x is not None]
    return inputs, [leaf.requires_grad_() for leaf in leaves]


def both_ways(case: Case, inputs, leaves):
    out, lse = forward(
        *leaves[:3], inputs.mask, inputs.alibi_slopes, inputs.sinks, inputs.seed, **case.options, deterministic=True
    )
    return [out, lse, *torch.autograd.grad([out, lse], leaves, [inputs.grad_out, inputs.grad_lse])]


def capture(function, warm: bool = True):
    """(graph, outputs). Warm-up runs on a side stream, as torch's documentation asks."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    if warm:
        with torch.cuda.stream(stream):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function()
    return graph, outputs


@pytest.mark.parametrize("case", CAPTURED, ids=str)
def test_capture_and_replay(case: Case, cuda: str):
    """X1, X3: replay on new inputs equals eager bit for bit; every launch lies on the captured stream."""
    inputs, leaves = leaves_of(case, cuda)
    graph, captured = capture(lambda: both_ways(case, inputs, leaves))
    for seed in (1, 2):
        fresh = make_inputs(case, torch.bfloat16, cuda, seed)
        with torch.no_grad():
            inputs.query.copy_(fresh.query), inputs.key.copy_(fresh.key), inputs.value.copy_(fresh.value)
            inputs.grad_out.copy_(fresh.grad_out), inputs.grad_lse.copy_(fresh.grad_lse)
        for tensor in captured:
            tensor.detach().fill_(float("nan"))
        graph.replay()
        for ours, theirs in zip(captured, both_ways(case, inputs, leaves), strict=True):
            assert torch.equal(ours, theirs)


def test_capture_without_warm_up(cuda: str):
    """X3: nothing in a first call may synchronise or allocate outside torch's allocator."""
    query = torch.randn(1, 3, 77, 256, device=cuda, dtype=torch.float16, requires_grad=True)
    grad = torch.randn_like(query)

    def function():
        out = attention(query, query, query)
        return out, *torch.autograd.grad(out, query, grad)

    graph, captured = capture(function, warm=False)
    graph.replay()
    torch.testing.assert_close(captured[0], function()[0])


def test_dropout_is_drawn_anew_at_each_replay(cuda: str):
    """R3: the seed lives on the device; backward of a replay uses its forward's mask."""
    query, key = (torch.randn(2, 4, 256, 64, device=cuda, requires_grad=True) for _ in range(2))
    value = torch.randn(2, 4, 256, 64, device=cuda, requires_grad=True)
    grad = torch.randn(2, 4, 256, 64, device=cuda)

    def function():
        out = attention(query, key, value, None, 0.3)
        return out, *torch.autograd.grad(out, (query, key, value), grad)

    graph, captured = capture(function)
    seen = []
    for _ in range(3):
        graph.replay()
        torch.testing.assert_close((captured[0] * grad).sum(), (captured[3] * value).sum(), rtol=1e-3, atol=1e-1)
        seen.append(captured[0].clone())
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


def test_capture_of_empty_sequences(cuda: str):
    """X2: a padding batch without keys, and packed sequences that are empty."""
    query, key = torch.randn(2, 2, 16, 64, device=cuda), torch.randn(2, 2, 0, 64, device=cuda)
    graph, (out, lse) = capture(lambda: forward(query, key, key, window_right=0))
    out.fill_(float("nan"))
    graph.replay()
    assert not out.any() and (lse == float("-inf")).all()
    rows = torch.randn(10, 2, 64, device=cuda)
    cu = torch.tensor([0, 0, 10, 10], dtype=torch.int32, device=cuda)
    graph, (out, _) = capture(lambda: torch.ops.flash.attention_varlen_forward(rows, rows, rows, cu, cu, 10, 10))
    cu.copy_(torch.tensor([0, 4, 4, 7], dtype=torch.int32))
    graph.replay()
    expected, _ = torch.ops.flash.attention_varlen_forward(rows, rows, rows, cu, cu, 10, 10)
    assert torch.equal(out, expected) and not out[7:].any()


def test_side_stream(cuda: str):
    """X1: work is ordered behind what the current stream already holds, in both directions."""
    inputs, leaves = leaves_of(Case("", rows=300, right=0), cuda)
    case = Case("", rows=300, right=0)
    expected = both_ways(case, inputs, leaves)
    hidden = [leaf.detach().clone() for leaf in leaves]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = [torch.full_like(leaf, float("nan")) for leaf in hidden]
        torch.cuda._sleep(200_000_000)
        for tensor, source in zip(late, hidden, strict=True):
            tensor.copy_(source)
        late = [tensor.requires_grad_() for tensor in late]
        result = both_ways(case, inputs, late)
    torch.cuda.current_stream().wait_stream(stream)
    for ours, theirs in zip(result, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "turns"])
@pytest.mark.parametrize("right", [None, 0])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_beside_a_kernel_that_stays(head_dim: int, right: int | None, deterministic: bool, cuda: str):
    """A multiprocessor that other work keeps costs its share, not the time until that work ends: no block waits for one that cannot
    start. (Communication beside training keeps some; a green context or another process may keep them for good.)"""
    leaves = [torch.randn(16, 8, 2048, head_dim, device=cuda, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    grad = torch.randn_like(leaves[0])

    def both() -> list[torch.Tensor]:
        out, _ = forward(*leaves, window_right=right, deterministic=deterministic)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    expected = both()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(4_000_000_000)  # two seconds
    results = both()
    torch.cuda.current_stream().synchronize()
    assert not stream.query()
    torch.cuda.synchronize()
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_no_synchronisation(cuda: str):
    """Nothing in forward or backward waits for the device, packed lengths included."""
    inputs, leaves = leaves_of(CAPTURED[-1], cuda)
    rows = torch.randn(10, 2, 64, device=cuda, requires_grad=True)
    cu = torch.tensor([0, 4, 10], dtype=torch.int32, device=cuda)
    both_ways(CAPTURED[-1], inputs, leaves)
    torch.cuda.set_sync_debug_mode("error")
    try:
        both_ways(CAPTURED[-1], inputs, leaves)
        torch.ops.flash.attention_varlen_forward(rows, rows, rows, cu, cu, 10, 10)[0].sum().backward()
        attention(leaves[0], leaves[1], leaves[2], None, 0.1).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_tensors_of_another_device(cuda: str):
    """D6: the current device is 0, the tensors live on 1, backward runs in a thread of its own."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.cuda.set_device(0)
    case = Case("", rows=100, right=0, sinks=True)
    results = [both_ways(case, *leaves_of(case, f"cuda:{index}")) for index in range(2)]
    for first, second in zip(*results, strict=True):
        assert second.device.index == 1
        assert torch.equal(first.cpu(), second.cpu())
    assert torch.cuda.current_device() == 0


def test_two_devices_at_once(cuda: str):
    """A thread for each: what is kept per device or stream (counters, tickets, kernel attributes, contexts) is not mixed up."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    cases = (Case("", rows=300, right=0), Case("", batch=1, heads=8, kv_heads=2, rows=1, keys=8192, head_dim=128))
    results: list[list[torch.Tensor]] = [[], []]

    def run(index: int) -> None:
        for case in cases:
            inputs, leaves = leaves_of(case, f"cuda:{index}")
            for _ in range(20):
                results[index] += both_ways(case, inputs, leaves)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results[0]) == 20 * 5 * len(cases)
    for first, second in zip(*results, strict=True):
        assert second.device.index == 1
        assert torch.equal(first.cpu(), second.cpu())


def test_mixed_devices_are_refused(cuda: str):
    query = torch.randn(1, 1, 4, 8)
    with pytest.raises(RuntimeError, match="same device type"):
        attention(query.to(cuda), query, query)
    with pytest.raises(RuntimeError, match="attn_mask"):
        attention(query.to(cuda), query.to(cuda), query.to(cuda), torch.ones(4, 4))
    with pytest.raises(RuntimeError, match="sinks"):
        forward(query.to(cuda), query.to(cuda), query.to(cuda), sinks=torch.ones(1))
