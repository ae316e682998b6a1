"""attention_rows_first: attention_forward of [B, L, H, E] tensors with one node of autograd, in every way that it may be called."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import reference

OPERATOR = torch.ops.flash.attention_rows_first
Leaves = tuple[Tensor, Tensor, Tensor]


def leaves(device: str, dtype: torch.dtype = torch.float64) -> Leaves:
    sizes = ((2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 8))
    query, key, value = (torch.randn(*size, device=device, dtype=dtype).requires_grad_() for size in sizes)
    return query, key, value


def rows_in(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return OPERATOR(query, key, value, 4, 0, True, 0.3)


def heads_in(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return OPERATOR(*(x.transpose(1, 2) for x in (query, key, value)), 4, 0, True, 0.3, 0.0, True)


def expected(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    heads_first = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = reference.attention(*heads_first, left=4, right=0, bottom_right=True, scale=0.3)
    return out.transpose(1, 2), lse


def gradients(call, inputs: Leaves) -> list[Tensor]:
    out, lse = call(*inputs)
    return [out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), inputs)]


BOTH = pytest.mark.parametrize("call", [rows_in, heads_in])


@BOTH
def test_results_and_gradients(call, device: str):
    inputs = leaves(device)
    assert call(*inputs)[0].is_contiguous()
    torch.testing.assert_close(gradients(call, inputs), gradients(expected, inputs))
    alone = (inputs[0].detach(), inputs[1], inputs[2].detach())  # a gradient of key only
    (dkey,) = torch.autograd.grad(call(*alone)[0].sum(), inputs[1])
    torch.testing.assert_close(dkey, torch.autograd.grad(expected(*inputs)[0].sum(), inputs[1])[0])


@BOTH
def test_both_derivatives(call, device: str):
    inputs = leaves(device)
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


@BOTH
def test_contract(call, device: str):
    swapped = [x.transpose(1, 2) for x in leaves(device)]
    arguments = leaves(device) if call is rows_in else swapped
    options = {"window_right": 0, "bottom_right": True, "heads_first_in": call is heads_in}
    torch.library.opcheck(OPERATOR.default, tuple(arguments), options)
    with torch.no_grad():
        out, lse = OPERATOR(*arguments, **options)
        torch.library.opcheck(
            torch.ops.flash.attention_rows_first_backward.default,
            (torch.randn_like(out), None, *arguments, out, lse, None, 0, True, None, 0.0, call is heads_in, None),
            test_utils=("test_schema", "test_faketensor"),
        )


@BOTH
def test_transforms(call, device: str):
    """torch.func, torch.compile, inference mode."""
    inputs = leaves(device)
    query, key, value = inputs

    def loss(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, lse = call(query, key, value)
        return out.square().sum() + lse.sum()

    want = gradients(expected, inputs)[2:]
    torch.testing.assert_close(list(torch.func.grad(loss, (0, 1, 2))(*inputs)), want)
    many = torch.randn(3, *query.shape, device=device, dtype=query.dtype)
    mapped = torch.func.vmap(torch.func.grad(loss), (0, None, None))(many, key, value)
    torch.testing.assert_close(mapped, torch.stack([torch.func.grad(loss)(x, key, value) for x in many]))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(list(torch.autograd.grad(compiled(*inputs), inputs)), want)
    with torch.inference_mode():
        torch.testing.assert_close(call(*inputs), expected(*inputs))


@BOTH
def test_compiled_autograd(call, device: str):
    """It traces with gradients that have no sizes."""
    inputs = leaves(device)
    if device != "cpu":
        pytest.skip("torch stands a CPU tensor in for the absent gradient of lse, and FakeTensor refuses mixed devices")
    out, lse = call(*inputs)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        (out.square().sum() + lse.sum()).backward()
    torch.testing.assert_close([x.grad for x in inputs], gradients(expected, inputs)[2:])


@BOTH
def test_autocast(call, device: str):
    inputs = leaves(device, torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        out, _ = call(*inputs)
        out.sum().backward()
    assert out.dtype == torch.bfloat16 and all(x.grad is not None and x.grad.dtype == torch.float32 for x in inputs)


@BOTH
def test_meta(call, device: str):
    real = leaves(device)
    fake: Leaves = tuple(x.detach().to("meta").requires_grad_() for x in real)  # type: ignore[assignment]
    for ours, theirs in zip(gradients(call, fake), gradients(call, real), strict=True):
        assert ours.shape == theirs.shape and ours.stride() == theirs.stride() and ours.dtype == theirs.dtype


def test_one_node(device: str):
    out, _ = rows_in(*leaves(device))
    assert {function is not None and function.name() for function, _ in out.grad_fn.next_functions} == {
        False,
        "torch::autograd::AccumulateGrad",
    }
