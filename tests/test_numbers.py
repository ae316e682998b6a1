"""NaN, infinities and extreme values."""

from __future__ import annotations

import math

import pytest
import torch

import reference
from cases import Case, make_inputs
from compare import (
    DTYPES,
    FORWARD,
    assert_same,
    assert_within,
    check,
    compare,
    delta_error,
    differentiate,
    dtype_name,
    poisoned,
)  # fmt: skip

forward = torch.ops.flash.attention_forward


def random(*size: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.float64).to(dtype).to(device)


def gradients_of(device: str, query, key, value, **options) -> dict[str, torch.Tensor]:
    leaves = {"query": query, "key": key, "value": value}
    with poisoned(device):
        return differentiate(
            lambda x: forward(x["query"], x["key"], x["value"], **options), leaves, torch.randn_like(query), None
        )


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_rows_that_see_nothing_are_zero(kind: str, dtype: torch.dtype, device: str):
    """N1, pytorch/pytorch#103963: rows 4 to 7 may attend to nothing."""
    query, key, value = (random(1, 1, 8, 8, device=device, dtype=dtype) for _ in range(3))
    mask = torch.zeros(8, 8, dtype=torch.bool, device=device)
    mask[:4, :4] = True
    if kind == "float":
        mask = torch.zeros(8, 8, dtype=dtype, device=device).masked_fill(~mask, -math.inf)
    result = gradients_of(device, query, key, value, attn_mask=mask[None, None])
    part = gradients_of(device, query[..., :4, :], key[..., :4, :], value[..., :4, :])
    assert not result["out"][..., 4:, :].any()
    assert (result["lse"][..., 4:] == -math.inf).all()
    torch.testing.assert_close(result["out"][..., :4, :], part["out"])
    for name in ("dquery", "dkey", "dvalue"):
        assert result[name].isfinite().all(), name
        assert not result[name][..., 4:, :].any(), name


def test_dead_row_does_not_spoil_the_batch(device: str):
    """N2, pytorch/pytorch#41508: a window mask joined with key padding leaves one row of one sample without keys."""
    query, key, value = (random(2, 2, 4, 8, device=device) for _ in range(3))
    row, column = torch.arange(4, device=device)[:, None], torch.arange(4, device=device)
    window = (column == row) | (column == row - 1)
    padding = torch.ones(2, 1, 1, 4, dtype=torch.bool, device=device)
    padding[0, ..., 2:] = False
    mask = torch.zeros(2, 1, 4, 4, device=device).masked_fill(~(window & padding), -math.inf)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out, _ = forward(*leaves, mask)
    out[:, :, :3].pow(2).sum().backward()
    assert not out[0, :, 3].any()
    truth = [x.detach().double().requires_grad_() for x in leaves]
    reference.attention(*truth, mask=mask)[0][:, :, :3].pow(2).sum().backward()
    for mine, true in zip(leaves, truth, strict=True):
        torch.testing.assert_close(mine.grad, true.grad.float(), rtol=1e-5, atol=1e-5)


def test_masking_a_whole_head(device: str):
    """N3, pytorch/pytorch#160064."""
    query, key, value = (random(1, 3, 5, 16, device=device) for _ in range(3))
    mask = torch.tensor([False, False, True], device=device)[:, None, None].expand(3, 5, 5)
    out = torch.ops.flash.attention(query, key, value, mask)
    assert not out[:, :2].any()
    torch.testing.assert_close(out[:, 2:], torch.ops.flash.attention(query[:, 2:], key[:, 2:], value[:, 2:]))


@pytest.mark.parametrize("rows", [1, 64])
def test_huge_finite_inputs(rows: int, device: str):
    """N4, pytorch/pytorch#121558: logits near 1.4e11 fit in fp32."""
    query = torch.full((1, 1, rows, 64), 133120.0, dtype=torch.bfloat16, device=device)
    out, lse = forward(query, query[..., :1, :], query[..., :1, :])
    assert (out == 133120.0).all()
    assert lse.isfinite().all()


def test_rows_masked_by_the_smallest_number(device: str):
    """N5, pytorch/pytorch#110213: finfo.min is not -inf. A row of it is the plain mean of the values."""
    query, key, value = (random(1, 1, 3, 4, device=device) for _ in range(3))
    mask = torch.ones(1, 1, 3, 3, device=device)
    mask[..., 0, :] = torch.finfo(torch.float32).min
    leaves, grad = {"query": query, "key": key, "value": value, "mask": mask}, torch.randn_like(query)
    ours = differentiate(lambda x: forward(x["query"], x["key"], x["value"], x["mask"]), leaves, grad, None)
    plain = differentiate(lambda x: reference.attention(x["query"], x["key"], x["value"], mask=x["mask"]), leaves, grad, None)
    torch.testing.assert_close(ours["out"][0, 0, 0], value[0, 0].mean(0))
    assert ours["lse"].isfinite().all()
    for name in ("out", "dquery", "dkey", "dvalue", "dmask"):  # lse of such a row has few digits left for backward
        torch.testing.assert_close(ours[name], plain[name], rtol=1e-2, atol=1e-2, msg=lambda text, name=name: f"{name}: {text}")

    query, key, value = (random(2, 2, 141, 64, device=device) for _ in range(3))
    mask = torch.zeros(1, 1, 141, 141, device=device)
    mask[..., :128] = torch.finfo(torch.float32).min
    out, _ = forward(query, key, value, mask)
    tail, _ = forward(query, key[:, :, 128:], value[:, :, 128:])
    torch.testing.assert_close(out, tail)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_name)
def test_very_negative_scores_are_not_masked(dtype: torch.dtype, device: str):
    """N6, flashinfer-ai/flashinfer#4267: every score lies near -2.4e5 / sqrt(D), below any finite stand-in for -inf."""
    query, key, value = (random(1, 2, 70, 128, device=device, dtype=dtype) * 0.1 for _ in range(3))
    query[..., :3], key[..., :3] = 448.0, -1880.0
    out, lse = forward(query, key, value)
    truth, true_lse = reference.attention(query.double(), key.double(), value.double())
    plain, plain_lse = reference.attention(query.float(), key.float(), value.float())
    assert_within("out", out, truth, plain.to(dtype), FORWARD, dtype)
    assert_within("lse", lse, true_lse, plain_lse, FORWARD, torch.float32)


@pytest.mark.parametrize("rows", [64, 192, 320, 704, 832])
def test_padded_keys_do_not_reach_the_gradient(rows: int, device: str):
    """N7, pytorch/pytorch#196678: keys past the end score 0, and exp(0 - lse) overflows where lse is about -120."""
    query, key, value, grad = (0.1 * random(1, 1, rows, 64, device=device) for _ in range(4))
    query[..., 0], key[..., 0] = 1.0, -120.0 * math.sqrt(64)
    query, key, value, grad = (x.bfloat16() for x in (query, key, value, grad))
    mask = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()[None, None]

    def run(function, dtype, *arguments, **options):
        leaves = {"query": query.to(dtype), "key": key.to(dtype), "value": value.to(dtype)}
        return differentiate(
            lambda x: function(x["query"], x["key"], x["value"], *arguments, **options), leaves, grad.to(dtype), None
        )

    for attn_mask, right in ((mask, None), (None, 0), (torch.ones_like(mask), None)):
        options = {"mask": attn_mask, "right": right}
        truth = run(reference.attention, torch.float64, **options)
        plain = run(reference.attention, torch.bfloat16, **options)
        with poisoned(device):
            ours = run(forward, torch.bfloat16, attn_mask, window_right=right)
        # Keys of size 960 weigh the part of delta's error that all keys of a row share.
        shared = 3 * delta_error(truth, grad, torch.bfloat16).max().item() * key.abs().max().item() / math.sqrt(64)
        single = run(reference.attention, torch.float32, **options)["lse"]
        compare(ours, truth, plain, single, torch.bfloat16, {"dquery": shared})


@pytest.mark.parametrize("rows", [97, 128, 200, 257])
def test_large_inputs_with_a_ragged_last_tile(rows: int, device: str):
    """N12, Dao-AILab/flash-attention#443."""
    for head_dim in (32, 64, 128):
        inputs = make_inputs(Case("", heads=3, rows=rows, head_dim=head_dim), torch.float16, device)
        inputs.query.mul_(5), inputs.key.mul_(3), inputs.value.mul_(3)
        check(Case("", heads=3, rows=rows, head_dim=head_dim), inputs, gradients=True)


@pytest.mark.parametrize("place", ["query", "key", "value"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_nan_in_a_used_input_stays(place: str, dtype: torch.dtype, device: str):
    """N9, pytorch/pytorch#141128: only a row of -inf may become 0."""
    query, key, value = (random(2, 4, 16, 8, device=device, dtype=dtype) for _ in range(3))
    {"query": query, "key": key, "value": value}[place].fill_(math.nan)
    assert torch.ops.flash.attention(query, key, value).isnan().all()


def test_one_nan_reaches_only_what_uses_it(device: str):
    query, key, value = (random(1, 2, 130, 16, device=device) for _ in range(3))
    query[0, 0, 70, 3] = math.nan
    out, lse = forward(query, key, value)
    assert out[0, 0, 70].isnan().all() and lse[0, 0, 70].isnan()
    out[0, 0, 70], lse[0, 0, 70] = 0.0, 0.0
    assert out.isfinite().all() and lse.isfinite().all()
    query[0, 0, 70, 3] = 0.0
    key[0, 1, 100, 0] = math.nan
    out, _ = forward(query, key, value, window_right=0)
    assert out[0, 1, 100:].isnan().all()
    assert out[0, 1, :100].isfinite().all() and out[0, 0].isfinite().all()
    key[0, 1, 100, 0] = 0.0
    value[0, 0, 5, 7] = math.nan
    out, _ = forward(query, key, value)
    assert out[0, 0, :, 7].isnan().all()
    assert out[0, 0, :, :7].isfinite().all()


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("kind", ["bool", "float", "causal", "window"])
def test_masked_keys_have_no_effect(kind: str, poison: float, device: str):
    """N10, pytorch/pytorch#101967: the score of a masked key is -inf whatever the key holds."""
    query, key, value = (random(2, 2, 70, 16, device=device) for _ in range(3))
    mask, options = None, {}
    if kind in ("bool", "float"):
        mask = torch.ones(1, 1, 1, 70, dtype=torch.bool, device=device)
        mask[..., 3] = mask[..., 66] = False
        if kind == "float":
            mask = torch.zeros(1, 1, 1, 70, device=device).masked_fill(~mask, -math.inf)
        places = [3, 66]
    elif kind == "causal":
        query, places, options = query[:, :, :40], [40, 63, 64, 69], {"window_right": 0}
    else:
        query, places, options = query[:, :, :40], [50, 69], {"window_left": 5, "window_right": 10}
    expected, expected_lse = forward(query, key, value, mask, **options)
    key[:, :, places] = poison
    out, lse = forward(query, key, value, mask, **options)
    assert_same(out, expected), assert_same(lse, expected_lse)


def test_skipped_blocks_and_memory_past_the_end_are_not_used(device: str):
    """Keys, values and rows next to the tensors in memory hold NaN, and so do key blocks that no row sees."""
    for rows, keys in ((33, 65), (64, 127), (7, 16)):
        case = Case("", batch=1, rows=rows, keys=keys, head_dim=24)
        inputs = make_inputs(case, torch.float32, device)
        clean = check(case, inputs, gradients=True)
        for name in ("query", "key", "value", "grad_out"):
            tensor = getattr(inputs, name)
            bigger = torch.full((3, 4, tensor.size(2) + 70, 24), math.nan, device=device)
            bigger[1:2, 1:3, 35 : 35 + tensor.size(2)] = tensor
            setattr(inputs, name, bigger[1:2, 1:3, 35 : 35 + tensor.size(2)])
        for name, tensor in check(case, inputs, gradients=True).items():
            assert_same(tensor, clean[name], name)
    query, key, value = (random(1, 1, 512, 32, device=device) for _ in range(3))
    query = query[:, :, :100]
    clean = gradients_of(device, query, key[:, :, :100], value[:, :, :100], window_right=0)
    key[:, :, 256:], value[:, :, 256:] = math.nan, math.nan
    torch.manual_seed(1)
    result = gradients_of(device, query, key, value, window_right=0)
    assert_same(result["out"], clean["out"])
    assert result["dquery"].isfinite().all()
    assert not result["dkey"][:, :, 256:].any() and not result["dvalue"][:, :, 256:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_name)
@pytest.mark.parametrize("mask_dtype", ["same", "float"])
def test_large_additive_masks(dtype: torch.dtype, mask_dtype: str, device: str):
    """N15, Dao-AILab/flash-attention#442: the mask is added in the accumulate type."""
    case = Case("", heads=2, rows=50, keys=70, head_dim=32, mask=f"{mask_dtype}:BHLS")
    inputs = make_inputs(case, dtype, device)
    inputs.mask.mul_(1e4)
    ours = forward(inputs.query, inputs.key, inputs.value, inputs.mask)
    truth = reference.attention(inputs.query.double(), inputs.key.double(), inputs.value.double(), mask=inputs.mask)
    plain = reference.attention(inputs.query.float(), inputs.key.float(), inputs.value.float(), mask=inputs.mask.float())
    assert_within("out", ours[0], truth[0], plain[0].to(dtype), FORWARD, dtype)
    assert_within("lse", ours[1], truth[1], plain[1], FORWARD, torch.float32)


def test_infinite_scores(device: str):
    """+inf in a mask is inf - inf = NaN, as in plain attention; -inf everywhere but one key selects that key."""
    query, key, value = (random(1, 1, 4, 8, device=device) for _ in range(3))
    mask = torch.zeros(1, 1, 4, 4, device=device)
    mask[..., 1, 2] = math.inf
    mask[..., 2, [0, 1, 3]] = -math.inf
    out, _ = forward(query, key, value, mask)
    assert out[0, 0, 1].isnan().all()
    torch.testing.assert_close(out[0, 0, 2], value[0, 0, 2])
    assert out[0, 0, [0, 3]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_growing_scores(dtype: torch.dtype, device: str):
    """The maximum rises with every key block, then falls: each fold rescales what was gathered before."""
    for direction in (1.0, -1.0):
        case = Case("", batch=1, heads=1, rows=70, keys=400, head_dim=16)
        inputs = make_inputs(case, dtype, device)
        inputs.key.mul_(torch.linspace(0.0, 20.0, 400, device=device)[:, None].to(dtype))
        if direction < 0:
            inputs.key = inputs.key.flip(2)
        check(case, inputs, gradients=True, grad_lse=True)


def test_equal_scores(device: str):
    """All keys equal: out is the mean of V, lse = score + log(S)."""
    query, value = random(1, 1, 5, 8, device=device), random(1, 1, 100, 8, device=device)
    key = torch.ones(1, 1, 100, 8, device=device)
    out, lse = forward(query, key, value)
    torch.testing.assert_close(out, value.mean(2, keepdim=True).expand_as(out), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, query.sum(-1) / math.sqrt(8) + math.log(100))


def test_gradients_of_a_peaked_softmax(device: str):
    """One key takes everything: dQ and dK are differences of almost equal numbers, lse is near 500."""
    case = Case("", batch=1, heads=1, rows=40, head_dim=32)
    inputs = make_inputs(case, torch.float32, device)
    inputs.query.mul_(8), inputs.key.mul_(8)
    check(case, inputs, gradients=True)
