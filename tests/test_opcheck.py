"""opcheck: schema, autograd registration, fake kernels with their strides, AOT with dynamic shapes."""

from __future__ import annotations

import pytest
import torch

from cases import COMBINED, Case, make_inputs, rows_first

flash = torch.ops.flash
attention = flash.attention

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
@pytest.mark.parametrize("case", OPCHECK, ids=str)
def test_opcheck_forward(case: Case, device: str):
    tensors, mask, slopes, sinks, seed = opcheck_inputs(case, device, grad=case is not OPCHECK[1])
    torch.library.opcheck(flash.attention_forward.default, (*tensors, mask, slopes, sinks, seed), case.options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, layout, wanted",
    [
        (OPCHECK[0], "contiguous", (True, True, True, False, False)),
        (OPCHECK[0], "transposed", (True, False, False, False, False)),
        (OPCHECK[-1], "expanded", (False, True, True, True, True)),
        (OPCHECK[-1], "transposed", (True, True, True, True, True)),
    ],
    ids=str,
)
def test_opcheck_backward(case: Case, layout: str, wanted, device: str):
    tensors, mask, slopes, sinks, seed = opcheck_inputs(case, device, grad=False)
    out, lse = flash.attention_forward(*tensors, mask, slopes, sinks, seed, **case.options)
    grad_out = {
        "contiguous": torch.randn_like(out),
        "transposed": torch.randn_like(out).mT.contiguous().mT,
        "expanded": torch.ones(1, device=device).expand(out.shape),
    }[layout]
    arguments = (grad_out, torch.randn_like(lse), *tensors, out, lse, mask, slopes, sinks, seed, list(wanted))
    torch.library.opcheck(flash.attention_backward.default, arguments, case.options)


@pytest.mark.slow
def test_opcheck_second_order(device: str):
    case = OPCHECK[-1]
    tensors, mask, slopes, sinks, seed = opcheck_inputs(case, device, grad=False)
    out, lse = flash.attention_forward(*tensors, mask, slopes, sinks, seed, **case.options)
    leaves = [x.detach().requires_grad_() for x in (torch.randn_like(out), *tensors, out, lse)]
    arguments = (leaves[0], None, *leaves[1:], mask, slopes, sinks, seed, [True] * 5)
    torch.library.opcheck(flash.attention_backward.default, arguments, case.options)


@pytest.mark.slow
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 2, 3)], ids=["rank2", "rank3", "rank4", "rank5"])
def test_opcheck_public(leading, device: str):
    """Another option with each rank."""
    leaves = [torch.randn(*leading, 5, 8, device=device, requires_grad=True) for _ in range(3)]
    rest, options = {
        0: ((torch.ones(5, 5, dtype=torch.bool, device=device),), {"scale": 0.3}),
        1: ((torch.randn(1, 5, device=device, requires_grad=True),), {}),
        2: ((None, 0.0, True), {}),
        3: ((), {}),
    }[len(leading)]
    torch.library.opcheck(attention.default, (*leaves, *rest), options)


@pytest.mark.slow
def test_opcheck_public_grouped_and_mixed_ranks(device: str):
    query, key, value = rows_first(device)
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
        (
            torch.randn_like(out),
            torch.randn_like(lse),
            *plain,
            out,
            lse,
            cu,
            cu,
            13,
            13,
            None,
            sinks.detach(),
            None,
            [True] * 4,
        ),
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
            flash.attention_forward.default,
            tuple(tensors),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )
