"""torch.compile: one graph, one or two compilations for all lengths, right gradients."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import flash_attn_ext
from cases import rows_first

flash = torch.ops.flash
attention = flash.attention


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradients(function, leaves, *rest):
    out = function(*leaves, *rest)
    out = out[0] if isinstance(out, tuple) else out
    return out.detach(), *torch.autograd.grad(out.pow(2).sum(), leaves)


def assert_same(ours, theirs) -> None:
    for mine, true in zip(ours, theirs, strict=True):
        assert mine.stride() == true.stride()
        torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-5)


FUNCTIONS = {
    "operator": lambda q, k, v: attention(q, k, v, is_causal=True, enable_gqa=True) * 2,
    "python": lambda q, k, v: flash_attn_ext.attention(q, k, v, causal="bottom_right", window=(q.shape[2] // 2, None)),
    "python-lse": lambda q, k, v: flash_attn_ext.attention(q, k, v, softcap=3.0, return_lse=True)[0],
    "rank3": lambda q, k, v: attention(q[0], k[0], v[0], enable_gqa=True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_graph(name: str, device: str):
    """T6: fullgraph, forward and backward, equal to eager in values and strides."""
    leaves = rows_first(device)
    compiled = torch.compile(FUNCTIONS[name], backend="aot_eager", fullgraph=True)
    assert_same(gradients(compiled, leaves), gradients(FUNCTIONS[name], leaves))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_lengths_do_not_recompile(name: str, device: str):
    """T3: lengths 100 to 228 take one static and one dynamic compilation."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(FUNCTIONS[name], backend=counter, fullgraph=True)
    for rows in (100, 101, 113, 127, 128, 129, 160, 199, 228):
        leaves = rows_first(device, rows)
        assert_same(gradients(compiled, leaves), gradients(FUNCTIONS[name], leaves))
    assert counter.frame_count <= 2


def test_everything_changes_and_nothing_recompiles(device: str):
    """L, S and the batch change, with a mask made from them; then every length as a mark of its own."""

    def function(query, key, value):
        rows, keys = query.shape[2], key.shape[2]
        mask = torch.zeros(rows, keys, device=query.device).triu(1)
        return attention(query, key, value, mask, enable_gqa=True)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for batch, rows, keys in ((2, 100, 128), (3, 101, 64), (5, 228, 100), (4, 17, 333)):
        leaves = rows_first(device, rows, keys, batch)
        assert_same(gradients(compiled, leaves), gradients(function, leaves))
    assert counter.frame_count <= 2


def test_packed_lengths_do_not_recompile(device: str):
    def function(query, key, value, cu, longest):
        return flash_attn_ext.attention_varlen(query, key, value, cu, cu, longest, longest, causal=True)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for total in (100, 113, 128, 160, 228):
        leaves = [torch.randn(total, h, 16, device=device, requires_grad=True) for h in (4, 2, 2)]
        cu = torch.tensor([0, 37, total], dtype=torch.int32, device=device)
        assert_same(gradients(compiled, leaves, cu, total - 37), gradients(function, leaves, cu, total - 37))
    assert counter.frame_count <= 2


def test_chunks_of_one_projection(device: str):
    """L11, pytorch/pytorch#134471: non-contiguous inputs under compile."""
    layer = torch.nn.Linear(32, 3 * 32, device=device)

    def function(x):
        query, key, value = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in layer(x).chunk(3, -1))
        return attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)

    x = torch.randn(2, 37, 32, device=device, requires_grad=True)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert_same(gradients(compiled, [x]), gradients(function, [x]))


@pytest.mark.slow
def test_inductor(device: str):
    """The default backend: kernels around the operator are generated, strides are asserted at run time."""

    def function(query, key, value):
        out = attention(query * 1.5, key, value.relu(), is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2).sigmoid()

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for rows in (65, 130):
        leaves = rows_first(device, rows)
        assert_same(gradients(compiled, leaves), gradients(function, leaves))


@pytest.mark.parametrize("where", ["plain", "checkpoint", "reentrant-outside"])
def test_dropout_under_compile(where: str, device: str):
    """R5, T9: forward and backward of a compiled call use one mask, also where forward is recomputed."""
    query, key, value = rows_first(device, 60, kv_heads=4)

    def layer(query, key, value):
        return attention(query.sin(), key, value, None, 0.5)

    def function(query, key, value):
        return checkpoint(layer, query, key, value, use_reentrant=False) if where == "checkpoint" else layer(query, key, value)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    out = (
        checkpoint(compiled, query, key, value, use_reentrant=True)
        if where == "reentrant-outside"
        else compiled(query, key, value)
    )
    grad = torch.randn_like(out)
    inner = (grad * out).sum().detach()
    for leaf in (query, key, value):
        leaf.grad = None
    out.backward(grad)
    # out is linear in value for a fixed mask; query's gradient is compared along its own direction by a reference below.
    torch.testing.assert_close(inner, (value.grad * value).sum(), rtol=1e-4, atol=1e-3)
    assert query.grad.any() and key.grad.any()


def test_two_dropout_calls_are_not_merged(device: str):
    """Common subexpressions are merged by compilers; two equal dropout calls are not equal."""
    query = torch.randn(2, 2, 50, 16, device=device, requires_grad=True)
    compiled = torch.compile(
        lambda q: (attention(q, q, q, None, 0.5), attention(q, q, q, None, 0.5)), backend="aot_eager", fullgraph=True
    )
    first, second = compiled(query)
    assert not torch.equal(first, second)


@pytest.mark.slow
def test_recomputation_under_a_memory_budget(device: str):
    """A budget below 1 recomputes operators in backward; the dropout seed must not be drawn anew."""
    import torch._functorch.config as functorch_config

    query, key, value = rows_first(device, 60, kv_heads=4)

    def function(query, key, value):
        out = query
        for _ in range(3):
            out = attention(out.sin(), key, value, None, 0.5).cos()
        return out

    with functorch_config.patch(activation_memory_budget=0.3, aggressive_recomputation=True):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        torch.manual_seed(7)
        out = compiled(query, key, value)
        ours = torch.autograd.grad(out.sum(), (query, key, value))
    torch.manual_seed(7)
    out = torch.compile(function, backend="aot_eager", fullgraph=True)(query, key, value)
    theirs = torch.autograd.grad(out.sum(), (query, key, value))
    assert_same(ours, theirs)


def test_autocast_inside_and_around(device: str):
    leaves = rows_first(device, kv_heads=4)

    def function(query, key, value):
        with torch.autocast(device, torch.bfloat16):
            return attention(query, key, value)

    expected = function(*leaves)
    assert expected.dtype == torch.bfloat16
    assert torch.equal(torch.compile(function, backend="aot_eager", fullgraph=True)(*leaves), expected)
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(torch.compile(attention, backend="aot_eager", fullgraph=True)(*leaves), expected)


def test_torch_func_inside_compile(device: str):
    leaves = [x.detach() for x in rows_first(device, kv_heads=4)]

    def function(*tensors):
        return torch.func.grad(lambda *x: attention(*x).pow(2).sum(), argnums=(0, 1, 2))(*tensors)

    assert_same(torch.compile(function, backend="aot_eager", fullgraph=True)(*leaves), function(*leaves))

    def mapped(*tensors):
        return torch.func.vmap(attention)(*tensors)

    batched = [x[:, None] for x in leaves]
    assert_same([torch.compile(mapped, backend="aot_eager", fullgraph=True)(*batched)], [mapped(*batched)])


def test_compiled_autograd_of_an_eager_forward(device: str):
    if device != "cpu":
        pytest.skip("torch stands a CPU tensor in for the absent gradient of lse, and FakeTensor refuses mixed devices")
    leaves = rows_first(device)
    expected = gradients(FUNCTIONS["operator"], leaves)
    out = FUNCTIONS["operator"](*leaves)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        out.pow(2).sum().backward()
    assert_same([leaf.grad for leaf in leaves], expected[1:])


def test_meta_tensors(device: str):
    """Shapes, dtypes and strides without memory, backward included."""
    leaves = rows_first(device)
    metas = [torch.empty_strided(x.shape, x.stride(), device="meta", requires_grad=True) for x in leaves]
    real, meta = (gradients(FUNCTIONS["python-lse"], tensors) for tensors in (leaves, metas))
    for ours, theirs in zip(meta, real, strict=True):
        assert ours.shape == theirs.shape and ours.stride() == theirs.stride() and ours.dtype == theirs.dtype
