"""torch.func: grad, vjp, vmap and their compositions, with a batching rule instead of a loop."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap

attention = torch.ops.flash.attention
forward = torch.ops.flash.attention_forward


@pytest.fixture(autouse=True)
def no_fallback():
    """torch warns when it has to loop over the batch because an operator has no batching rule."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop.*")
        yield


def random(*size: int, device: str) -> torch.Tensor:
    return torch.randn(*size, device=device, dtype=torch.float64)


def operands(device: str, *leading: int, heads: int = 2, kv_heads: int | None = None):
    kv_heads = heads if kv_heads is None else kv_heads
    return [random(*leading, h, size, 4, device=device) for h, size in ((heads, 5), (kv_heads, 7), (kv_heads, 7))]


def loop(function, arguments, in_dims):
    count = next(x.size(dim) for x, dim in zip(arguments, in_dims, strict=True) if dim is not None)
    results = [
        function(*(x if dim is None else x.select(dim, index) for x, dim in zip(arguments, in_dims, strict=True)))
        for index in range(count)
    ]
    if isinstance(results[0], tuple):
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return torch.stack(results)


def assert_same(ours, theirs) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def loss(query, key, value, *mask):
    return attention(query, key, value, *mask).pow(2).sum()


def test_grad_and_vjp(device: str):
    leaves = operands(device, 3)
    expected = torch.autograd.grad(loss(*(leaf.requires_grad_() for leaf in leaves)), leaves)
    leaves = [leaf.detach() for leaf in leaves]
    assert_same(grad(loss, argnums=(0, 1, 2))(*leaves), expected)
    out, pull = vjp(attention, *leaves)
    assert_same(pull(2 * out), expected)


def test_second_derivative(device: str):
    query, key, value = operands(device, 1)

    def inner(query):
        return grad(loss)(query, key, value).pow(2).sum()

    leaf = query.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf, key, value), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), leaf)
    assert_same(grad(inner)(query), second)


@pytest.mark.parametrize(
    "in_dims", [(0, 0, 0), (1, 0, 2), (None, 0, 0), (0, None, None), (0, 0, None), (None, 0, None)], ids=str
)
@pytest.mark.parametrize("leading", [(), (3,), (2, 2)], ids=["rank3", "rank4", "rank5"])
def test_vmap(in_dims, leading, device: str):
    """F3: mapped and unmapped operands, at any place, for every rank."""
    leaves = [
        x if dim is None else random(6, *x.shape, device=device).movedim(0, dim)
        for x, dim in zip(operands(device, *leading), in_dims, strict=True)
    ]
    assert_same(vmap(attention, in_dims)(*leaves), loop(attention, leaves, in_dims))
    gradient = grad(loss, argnums=(0, 1, 2))
    assert_same(vmap(gradient, in_dims)(*leaves), loop(gradient, leaves, in_dims))


@pytest.mark.parametrize("kind", ["float", "bool"])
@pytest.mark.parametrize("mask_dim", [0, None])
@pytest.mark.parametrize("size", [(7,), (5, 7), (2, 5, 7), (1, 1, 1, 7), (3, 1, 5, 7)], ids=str)
def test_vmap_with_a_mask(kind: str, mask_dim, size, device: str):
    leaves = [random(4, *x.shape, device=device) for x in operands(device, 3)]
    mask = random(*((4,) if mask_dim == 0 else ()), *size, device=device)
    mask = mask > -0.5 if kind == "bool" else mask
    in_dims = (0, 0, 0, mask_dim)
    assert_same(vmap(attention, in_dims)(*leaves, mask), loop(attention, [*leaves, mask], in_dims))
    wanted = (0, 1, 2, 3) if kind == "float" else (0, 1, 2)
    gradient = grad(loss, argnums=wanted)
    assert_same(vmap(gradient, in_dims)(*leaves, mask), loop(gradient, [*leaves, mask], in_dims))


def test_vmap_of_the_inner_operator(device: str):
    """Sinks, slopes, grouped heads and lse under vmap(grad), each mapped or not."""
    query, key, value = [random(3, *x.shape, device=device) for x in operands(device, 2, heads=4, kv_heads=2)]
    sinks, slopes = random(3, 4, device=device), random(4, device=device).abs()

    def inner_loss(query, key, value, sinks, slopes):
        out, lse = forward(query, key, value, None, slopes, sinks, window_left=3, softcap=2.0)
        return out.pow(2).sum() + lse.sin().sum()

    gradient = grad(inner_loss, argnums=(0, 1, 2, 3))
    for sink_dim, slope_dim in ((0, None), (None, None), (0, 0), (None, 0)):
        arguments = (
            query, key, value, sinks if sink_dim == 0 else sinks[0],
            slopes.expand(3, 4) * torch.arange(1, 4, device=device)[:, None] if slope_dim == 0 else slopes,
        )  # fmt: skip
        in_dims = (0, 0, 0, sink_dim, slope_dim)
        assert_same(vmap(gradient, in_dims)(*arguments), loop(gradient, arguments, in_dims))


def test_vmap_of_vmap(device: str):
    leaves = [random(3, 2, *x.shape, device=device) for x in operands(device, 2)]
    expected = torch.stack([loop(attention, [x[index] for x in leaves], (0, 0, 0)) for index in range(3)])
    assert_same(vmap(vmap(attention))(*leaves), expected)
    query = leaves[0]
    inner_only_keys = vmap(vmap(attention, (None, 0, 0)))(query[:, 0], *leaves[1:])
    assert_same(
        inner_only_keys,
        torch.stack([loop(attention, (query[i, 0], leaves[1][i], leaves[2][i]), (None, 0, 0)) for i in range(3)]),
    )


def test_jacobian(device: str):
    query, key, value = operands(device, 1)
    ours = jacrev(attention)(query, key, value)
    theirs = torch.autograd.functional.jacobian(lambda q: attention(q, key, value), query)
    assert_same(ours, theirs)
    tiny = query[:, :1, :2, :2], key[:, :1, :2, :2], value[:, :1, :2, :2]
    ours = jacrev(jacrev(lambda q: attention(q, *tiny[1:]).sum()))(tiny[0])
    theirs = torch.autograd.functional.hessian(lambda q: attention(q, *tiny[1:]).sum(), tiny[0])
    assert_same(ours, theirs)


def through_dual_numbers(function, query):
    with torch.autograd.forward_ad.dual_level():
        return function(torch.autograd.forward_ad.make_dual(query, torch.ones_like(query)))


@pytest.mark.parametrize(
    "transform",
    [
        lambda function, query: jvp(function, (query,), (torch.ones_like(query),)),
        lambda function, query: jacfwd(function)(query),
        through_dual_numbers,
    ],
    ids=["jvp", "jacfwd", "dual numbers"],
)
def test_forward_mode_says_what_to_do(transform, device: str):
    """F2: no forward-mode derivative, and an error that names the way out."""
    query, key, value = operands(device, 1)
    with pytest.raises(NotImplementedError, match="forward-mode.*(jacrev|vjp)"):
        transform(lambda query: attention(query, key, value), query)


def test_dropout_under_vmap(device: str):
    """randomness="error" is torch's own refusal; "same" is one mask for all, "different" one each."""
    query = torch.ones(6, 1, 2, 64, 8, device=device, dtype=torch.float64)
    value = torch.eye(64, device=device, dtype=torch.float64).expand(6, 1, 2, 64, 64)

    def dropped(query, value):
        return attention(query, query, value, None, 0.5)

    with pytest.raises(RuntimeError, match="randomness"):
        vmap(dropped)(query, value)
    same = vmap(dropped, randomness="same")(query, value)
    different = vmap(dropped, randomness="different")(query, value)
    assert all(torch.equal(same[0], other) for other in same[1:])
    assert all(not torch.equal(different[0], other) for other in different[1:])

    def gradient(value, query):
        return grad(lambda v: dropped(query, v).sum())(value)

    for mode in ("same", "different"):
        torch.manual_seed(2)
        outs = vmap(dropped, randomness=mode)(query, value)
        torch.manual_seed(2)
        gradients = vmap(gradient, randomness=mode)(value, query)
        assert_same(gradients[..., 0], outs.sum(-2))  # d(sum of out)/dv[key, :] = sum of the key's weights


def test_ensemble_of_modules(device: str):
    """Per-sample gradients of a module, the way torch.func documents them."""
    layer = torch.nn.Linear(8, 24, device=device, dtype=torch.float64)
    parameters = {name: value.detach() for name, value in layer.named_parameters()}
    batch = random(5, 6, 8, device=device)

    def sample_loss(parameters, x):
        query, key, value = functional_call(layer, parameters, (x,)).unflatten(-1, (3, 2, 4)).permute(1, 2, 0, 3)
        return attention(query, key, value, is_causal=True).pow(2).sum()

    ours = vmap(grad(sample_loss), (None, 0))(parameters, batch)
    for index in range(5):
        single = grad(sample_loss)(parameters, batch[index])
        for name, value in single.items():
            assert_same(ours[name][index], value)


def test_vmap_of_other_operators(device: str):
    """merge and packed attention under vmap."""
    out, lse = random(2, 4, 3, 5, device=device), random(2, 4, 3, device=device)
    arguments = (out[0], lse[0], out[1], lse[1])
    assert_same(vmap(torch.ops.flash.merge)(*arguments), loop(torch.ops.flash.merge, arguments, (0,) * 4))
    cu = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)

    def packed(query, key, value):
        return torch.ops.flash.attention_varlen_forward(query, key, value, cu, cu, 5, 5)

    leaves = [random(3, 8, 2, 4, device=device) for _ in range(3)]
    assert_same(vmap(packed)(*leaves), loop(packed, leaves, (0,) * 3))
    gradient = grad(lambda *x: packed(*x)[0].pow(2).sum(), argnums=(0, 1, 2))
    assert_same(vmap(gradient)(*leaves), loop(gradient, leaves, (0,) * 3))
