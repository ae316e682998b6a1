"""torch.compile, export, AOT compilation and opcheck (cases.md A14)."""

from __future__ import annotations

import flash_attn_ext
import pytest
import torch
from cases import COMBINED, Case, make_inputs
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

flash = torch.ops.flash
attention = flash.attention


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def operands(device: str, rows: int = 33, keys: int | None = None, batch: int = 2, heads: int = 4, kv_heads: int = 2, dim: int = 16):
    """BSHD memory, as models have it: [batch, heads, rows, dim] views."""
    keys = rows if keys is None else keys
    return [
        torch.randn(batch, size, h, dim, device=device).transpose(1, 2).requires_grad_()
        for h, size in ((heads, rows), (kv_heads, keys), (kv_heads, keys))
    ]


# ---- opcheck: schema, autograd registration, fake kernels (strides!), AOT with dynamic shapes -----------------------------------

OPCHECK = [
    Case("bshd", heads=4, kv_heads=2, rows=37, keys=70, head_dim=20),
    Case("causal", rows=33, right=0),
    Case("one-row-mask", rows=1, keys=50, mask="float:B1LS"),
    Case("value-dim", rows=19, keys=35, head_dim=24, value_dim=9),
    Case("window-sinks", rows=45, left=10, right=3, sinks=True, alibi="H", softcap=3.0),
    *COMBINED[:2],
]


def opcheck_inputs(case: Case, device: str, grad: bool):
    inputs = make_inputs(case, torch.float32, device)
    tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (inputs.query, inputs.key, inputs.value)]
    mask = inputs.mask if inputs.mask is None or not inputs.mask.is_floating_point() else inputs.mask.requires_grad_(grad)
    sinks = None if inputs.sinks is None else inputs.sinks.requires_grad_(grad)
    return [x.requires_grad_(grad) for x in tensors], mask, inputs.alibi_slopes, sinks, inputs.seed


@pytest.mark.slow
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
@pytest.mark.parametrize("case", OPCHECK, ids=str)
def test_opcheck_forward(case: Case, grad: bool, device: str):
    tensors, mask, slopes, sinks, seed = opcheck_inputs(case, device, grad)
    torch.library.opcheck(flash.attention_forward.default, (*tensors, mask, slopes, sinks, seed), case.options)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [(True,) * 5, (True, False, False, False, True), (False, True, True, True, False)], ids=str)
@pytest.mark.parametrize("case", [OPCHECK[0], OPCHECK[-1]], ids=str)
def test_opcheck_backward(case: Case, wanted, device: str):
    tensors, mask, slopes, sinks, seed = opcheck_inputs(case, device, False)
    out, lse = flash.attention_forward(*tensors, mask, slopes, sinks, seed, **case.options)
    wanted = [*wanted[:3], wanted[3] and mask is not None, wanted[4] and sinks is not None]
    for grad_out in (torch.randn_like(out), torch.randn_like(out).mT.contiguous().mT, torch.ones(1, device=device).expand(out.shape)):
        arguments = (grad_out, torch.randn_like(lse), *tensors, out, lse, mask, slopes, sinks, seed, wanted)
        torch.library.opcheck(flash.attention_backward.default, arguments, case.options)
    leaves = [x.detach().requires_grad_() for x in (grad_out, *tensors, out, lse)]  # second order
    arguments = (leaves[0], None, *leaves[1:], mask, slopes, sinks, seed, wanted)
    torch.library.opcheck(flash.attention_backward.default, arguments, case.options)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 5, 8), (2, 2, 3, 5, 8)], ids=str)
def test_opcheck_public(shape, device: str):
    leaves = [torch.randn(shape, device=device, requires_grad=True) for _ in range(3)]
    torch.library.opcheck(attention.default, (*leaves,))
    torch.library.opcheck(attention.default, (*leaves, torch.ones(5, 5, dtype=torch.bool, device=device)), {"scale": 0.3})
    torch.library.opcheck(attention.default, (*leaves, torch.randn(1, 5, device=device, requires_grad=True)))
    torch.library.opcheck(attention.default, (*leaves, None, 0.0, True))


@pytest.mark.slow
def test_opcheck_public_grouped_and_mixed_ranks(device: str):
    query, key, value = operands(device)
    torch.library.opcheck(attention.default, (query, key, value), {"enable_gqa": True})
    query = torch.randn(4, 3, 8, device=device, requires_grad=True)
    key = torch.randn(4, 4, 6, 8, device=device, requires_grad=True)
    torch.library.opcheck(attention.default, (query, key, key))


@pytest.mark.slow
def test_opcheck_others(device: str):
    cu = torch.tensor([0, 5, 5, 18], dtype=torch.int32, device=device)
    leaves = [torch.randn(20, h, 8, device=device, requires_grad=True) for h in (4, 2, 2)]
    sinks = torch.randn(4, device=device, requires_grad=True)
    arguments = (*leaves, cu, cu, 13, 13, None, sinks, None)
    torch.library.opcheck(flash.attention_varlen_forward.default, arguments, {"window_right": 0})
    plain = [x.detach() for x in leaves]
    out, lse = flash.attention_varlen_forward(*plain, cu, cu, 13, 13, None, sinks.detach())
    torch.library.opcheck(
        flash.attention_varlen_backward.default,
        (torch.randn_like(out), torch.randn_like(lse), *plain, out, lse, cu, cu, 13, 13, None, sinks.detach(), None, [True] * 4),
    )
    parts = [torch.randn(2, 3, 4, device=device, requires_grad=True) for _ in range(2)]
    lses = [torch.randn(2, 3, device=device, requires_grad=True) for _ in range(2)]
    torch.library.opcheck(flash.merge.default, (parts[0], lses[0], parts[1], lses[1]))
    torch.library.opcheck(flash.dropout_mask.default, (torch.rand(2, dtype=torch.float64, device=device), [2, 3, 17, 33], 0.3))


def test_empty_shapes_have_the_fake_shapes(device: str):
    """Zero sizes through the fake kernels: T7's comparison of every output, shape and stride."""
    for query, key, value in (
        ((2, 3, 0, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
        ((2, 3, 5, 8), (2, 3, 0, 8), (2, 3, 0, 8)),
        ((0, 3, 5, 8), (0, 3, 5, 8), (0, 3, 5, 4)),
    ):
        tensors = [torch.randn(size, device=device, requires_grad=True) for size in (query, key, value)]
        torch.library.opcheck(
            flash.attention_forward.default, tuple(tensors), test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
        )


# ---- torch.compile ---------------------------------------------------------------------------------------------------------------


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
    leaves = operands(device)
    compiled = torch.compile(FUNCTIONS[name], backend="aot_eager", fullgraph=True)
    assert_same(gradients(compiled, leaves), gradients(FUNCTIONS[name], leaves))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_lengths_do_not_recompile(name: str, device: str):
    """T3: lengths 100 to 228 take one static and one dynamic compilation."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(FUNCTIONS[name], backend=counter, fullgraph=True)
    for rows in (100, 101, 113, 127, 128, 129, 160, 199, 228):
        leaves = operands(device, rows)
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
        leaves = operands(device, rows, keys, batch)
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
        leaves = operands(device, rows)
        assert_same(gradients(compiled, leaves), gradients(function, leaves))


@pytest.mark.parametrize("where", ["plain", "checkpoint", "reentrant-outside"])
def test_dropout_under_compile(where: str, device: str):
    """R5, T9: forward and backward of a compiled call use one mask, also where forward is recomputed."""
    query, key, value = operands(device, 60, kv_heads=4)

    def layer(query, key, value):
        return attention(query.sin(), key, value, None, 0.5)

    def function(query, key, value):
        return checkpoint(layer, query, key, value, use_reentrant=False) if where == "checkpoint" else layer(query, key, value)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    out = checkpoint(compiled, query, key, value, use_reentrant=True) if where == "reentrant-outside" else compiled(query, key, value)
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

    query, key, value = operands(device, 60, kv_heads=4)

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
    leaves = operands(device, kv_heads=4)

    def function(query, key, value):
        with torch.autocast(device, torch.bfloat16):
            return attention(query, key, value)

    expected = function(*leaves)
    assert expected.dtype == torch.bfloat16
    assert torch.equal(torch.compile(function, backend="aot_eager", fullgraph=True)(*leaves), expected)
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(torch.compile(attention, backend="aot_eager", fullgraph=True)(*leaves), expected)


def test_torch_func_inside_compile(device: str):
    leaves = [x.detach() for x in operands(device, kv_heads=4)]

    def function(*tensors):
        return torch.func.grad(lambda *x: attention(*x).pow(2).sum(), argnums=(0, 1, 2))(*tensors)

    assert_same(torch.compile(function, backend="aot_eager", fullgraph=True)(*leaves), function(*leaves))

    def mapped(*tensors):
        return torch.func.vmap(attention)(*tensors)

    batched = [x[:, None] for x in leaves]
    assert_same([torch.compile(mapped, backend="aot_eager", fullgraph=True)(*batched)], [mapped(*batched)])


def test_compiled_autograd_of_an_eager_forward(device: str):
    leaves = operands(device)
    expected = gradients(FUNCTIONS["operator"], leaves)
    out = FUNCTIONS["operator"](*leaves)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        out.pow(2).sum().backward()
    assert_same([leaf.grad for leaf in leaves], expected[1:])


# ---- export ----------------------------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def forward(self, query, key, value, mask):
        return attention(query, key, value, mask, enable_gqa=True)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool, device: str):
    """T4, T8: one dynamic program for lengths 1 to 1024, no divisibility guards; one node, before and after decomposition."""
    query, key, value = (x.detach() for x in operands(device, 40, 50))
    length, keys = torch.export.Dim("length", min=1, max=1024), torch.export.Dim("keys", min=1, max=1024)
    program = torch.export.export(
        Model(),
        (query, key, value, torch.randn(40, 50, device=device)),
        dynamic_shapes=({2: length}, {2: keys}, {2: keys}, {0: length, 1: keys}),
        strict=strict,
    )
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "flash.attention.default" in names
    decomposed = program.run_decompositions()
    names = {str(node.target) for node in decomposed.graph.nodes if node.op == "call_function"}
    assert "flash.attention_forward.default" in names and not any("softmax" in name for name in names)
    for rows, columns in ((1, 1), (33, 129), (1000, 3)):
        query, key, value = (x.detach() for x in operands(device, rows, columns))
        mask = torch.randn(rows, columns, device=device)
        expected = Model()(query, key, value, mask)
        assert torch.equal(program.module()(query, key, value, mask), expected)
        assert torch.equal(decomposed.module()(query, key, value, mask), expected)


def test_save_and_load_an_exported_program(device: str, tmp_path):
    query, key, value = (x.detach() for x in operands(device))
    mask = torch.randn(33, 33, device=device)
    program = torch.export.export(Model(), (query, key, value, mask))
    torch.export.save(program, tmp_path / "attention.pt2")
    loaded = torch.export.load(tmp_path / "attention.pt2")
    assert torch.equal(loaded.module()(query, key, value, mask), Model()(query, key, value, mask))


@pytest.mark.slow
def test_ahead_of_time_package(device: str, tmp_path):
    """AOTInductor calls the operator by name through its proxy executor."""
    query, key, value = (x.detach() for x in operands(device))
    mask = torch.randn(33, 33, device=device)
    length = torch.export.Dim("length", min=2, max=512)
    program = torch.export.export(
        Model(), (query, key, value, mask), dynamic_shapes=({2: length}, {2: length}, {2: length}, {0: length, 1: length})
    )
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "attention.pt2"))
    model = torch._inductor.aoti_load_package(path)
    assert torch.equal(model(query, key, value, mask), Model()(query, key, value, mask))


def test_meta_tensors(device: str):
    """Shapes, dtypes and strides without memory, backward included."""
    leaves = operands(device)
    metas = [torch.empty_strided(x.shape, x.stride(), device="meta", requires_grad=True) for x in leaves]
    real, meta = (gradients(FUNCTIONS["python-lse"], tensors) for tensors in (leaves, metas))
    for ours, theirs in zip(meta, real, strict=True):
        assert ours.shape == theirs.shape and ours.stride() == theirs.stride() and ours.dtype == theirs.dtype
