"""Gradients against the reference, over the whole table of cases, and what reaches backward in odd shapes."""

from __future__ import annotations

import pytest
import torch

import reference
from cases import DENSE, Case, make_inputs
from compare import (
    DTYPES,
    GRADIENTS,
    assert_same,
    check,
    compare,
    dtype_name,
    is_refused,
    poisoned,
    run_flash,
    run_reference,
    tensors_of,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("case", DENSE, ids=str)
def test_case(case: Case, dtype: torch.dtype, device: str):
    """Every second case also sends a gradient into lse."""
    inputs = make_inputs(case, dtype, device)
    if is_refused(case, inputs):
        return
    ours = check(case, inputs, gradients=True, grad_lse=DENSE.index(case) % 2 == 0)
    for name, tensor in tensors_of(inputs).items():
        assert ours["d" + name].dtype == tensor.dtype
        assert ours["d" + name].shape == tensor.shape


@pytest.mark.parametrize("case", [Case("plain"), Case("all", softcap=2.0, sinks=True, mask="float:B1LS", right=3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_gradient_of_lse_alone(case: Case, dtype: torch.dtype, device: str):
    inputs = make_inputs(case, dtype, device)
    inputs.grad_out.zero_()
    check(case, inputs, gradients=True, grad_lse=True)


def test_lse_gradient_without_out(device: str):
    """out is not used at all: its gradient arrives undefined, not as zeros."""
    query, key, value = (torch.randn(2, 2, 33, 16, device=device, requires_grad=True) for _ in range(3))
    torch.ops.flash.attention_forward(query, key, value)[1].sum().backward()
    truth = [x.detach().double().requires_grad_() for x in (query, key, value)]
    reference.attention(*truth)[1].sum().backward()
    torch.testing.assert_close(query.grad, truth[0].grad.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(key.grad, truth[1].grad.float(), rtol=1e-5, atol=1e-5)
    assert value.grad is None or not value.grad.any()


def all_inputs_case() -> Case:
    return Case("", heads=4, kv_heads=2, rows=35, keys=50, head_dim=16, mask="float:B1LS", sinks=True, right=20)


@pytest.mark.parametrize("wanted", [1 << place for place in range(5)] + [0b00110, 0b11000, 0b10101, 0b11111])
def test_only_the_wanted_gradients(wanted: int, device: str):
    """output_mask: the others are undefined, the wanted ones do not depend on what else is wanted."""
    case = all_inputs_case()
    inputs = make_inputs(case, torch.float32, device)
    everything = run_flash(case, inputs, gradients=True, grad_lse=True)
    output_mask = [bool(wanted >> place & 1) for place in range(5)]
    with poisoned(device):
        gradients = torch.ops.flash.attention_backward(
            inputs.grad_out, inputs.grad_lse, inputs.query, inputs.key, inputs.value, everything["out"], everything["lse"],
            inputs.mask, None, inputs.sinks, None, output_mask, **case.options,
        )  # fmt: skip
    for name, asked, gradient in zip(GRADIENTS, output_mask, gradients, strict=True):
        assert (gradient is not None) == asked, name
        if asked:
            torch.testing.assert_close(gradient, everything["d" + name], rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", GRADIENTS)
def test_one_input_requires_grad(name: str, device: str):
    """Only the mask, or only the sinks, may need a gradient (pytorch/pytorch#148476, #136101)."""
    case = all_inputs_case()
    inputs = make_inputs(case, torch.float32, device)
    everything = run_flash(case, inputs, gradients=True)
    leaves = tensors_of(inputs)
    leaf = leaves[name] = leaves[name].clone().requires_grad_()
    out, _ = torch.ops.flash.attention_forward(
        leaves["query"], leaves["key"], leaves["value"], leaves["mask"], None, leaves["sinks"], None, **case.options
    )
    out.backward(inputs.grad_out)
    torch.testing.assert_close(leaf.grad, everything["d" + name], rtol=1e-6, atol=1e-6)
    assert all(tensor.grad is None for other, tensor in leaves.items() if other != name)


def incoming_layouts(grad: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same values, or views that real graphs produce, in every memory order."""
    batch, heads, rows, dim = grad.shape
    wide = torch.full((batch, heads, rows, 2 * dim), float("nan"), dtype=grad.dtype, device=grad.device)
    wide[..., ::2] = grad
    skipped = torch.full((2 * batch, rows, heads, dim), float("nan"), dtype=grad.dtype, device=grad.device)
    skipped[::2] = grad.transpose(1, 2)
    return {
        "rows-first": grad.transpose(1, 2).contiguous().transpose(1, 2),
        "transposed-last": grad.mT.contiguous().mT,
        "heads-last": grad.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
        "every-second-value": wide[..., ::2],
        "every-second-batch": skipped[::2].transpose(1, 2),
    }


def test_layout_of_grad_out_does_not_matter(device: str):
    case = Case("", heads=4, kv_heads=2, rows=49, keys=35, head_dim=32)
    inputs = make_inputs(case, torch.float32, device)
    expected = run_flash(case, inputs, gradients=True)
    for layout, grad in incoming_layouts(inputs.grad_out).items():
        inputs.grad_out = grad
        result = run_flash(case, inputs, gradients=True)
        for name in ("dquery", "dkey", "dvalue"):
            assert_same(result[name], expected[name], f"{layout}: {name}")


@pytest.mark.parametrize("reduce", [torch.sum, torch.mean, lambda out: out[..., :1].sum()], ids=["sum", "mean", "slice"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_expanded_grad_out(reduce, dtype: torch.dtype, device: str):
    """out.sum().backward() sends a gradient whose strides are all 0 (Dao-AILab/flash-attention#325)."""
    query, key, value = (torch.randn(1, 5, 2, 8, dtype=dtype, device=device) for _ in range(3))

    def gradients(function, kind):
        leaves = [x.transpose(1, 2).to(kind).detach().requires_grad_() for x in (query, key, value)]
        return dict(zip(("dquery", "dkey", "dvalue"), torch.autograd.grad(reduce(function(*leaves)), leaves), strict=True))

    ours = gradients(lambda *x: torch.ops.flash.attention(*x, is_causal=True), dtype)
    truth = gradients(lambda *x: reference.attention(*x, right=0)[0], torch.float64)
    plain = gradients(lambda *x: reference.attention(*x, right=0)[0], dtype)
    compare(ours, truth, plain, torch.empty(0), dtype)


def test_gradient_flows_on_through_other_operators(device: str):
    """cat of the output with itself, then a linear map: grad_out is a slice of a bigger tensor."""
    weight = torch.randn(32, 5, device=device, dtype=torch.float64)
    leaves = [torch.randn(2, 3, 20, 16, device=device, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def loss(out):
        return (torch.cat([out, out * 2], -1) @ weight).pow(2).sum()

    ours = torch.autograd.grad(loss(torch.ops.flash.attention(*leaves)), leaves)
    truth = torch.autograd.grad(loss(reference.attention(*leaves)[0]), leaves)
    for mine, true in zip(ours, truth, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("alignment", [False, True], ids=["top-left", "bottom-right"])
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 127, 128, 129, 257, 1000])
def test_every_pair_of_lengths_causal(rows: int, alignment: bool, device: str):
    """Block skipping on both sides of the diagonal, wherever it crosses the blocks."""
    for keys in (1, 63, 64, 65, 127, 128, 129, 257, 1000):
        case = Case("", batch=1, heads=1, rows=rows, keys=keys, head_dim=16, right=0, bottom_right=alignment)
        try:
            check(case, make_inputs(case, torch.float32, device), gradients=True)
        except AssertionError as problem:
            raise AssertionError(f"{rows} rows, {keys} keys: {problem}") from None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
def test_gradients_summed_over_many_rows_keep_their_digits(dtype: torch.dtype, device: str):
    """dK and dV add up 2000 rows, and with grouped heads four times as many: sums must not be kept in the narrow type."""
    case = Case("", batch=1, heads=4, kv_heads=1, rows=500, keys=3, head_dim=16)
    inputs = make_inputs(case, dtype, device)
    ours = run_flash(case, inputs, gradients=True)
    truth = run_reference(case, inputs, torch.float64, gradients=True)
    epsilon = torch.finfo(dtype).eps
    for name in ("dkey", "dvalue"):
        error = (ours[name].double() - truth[name]).abs().max() / truth[name].abs().max()
        assert error < 2 * epsilon, f"{name}: relative error {error:.2e}, one rounding is {epsilon:.2e}"
