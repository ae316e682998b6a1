"""attention_forward against the reference, over the whole table of cases."""

from __future__ import annotations

import pytest
import torch

import reference
from cases import DENSE, SIZES, Case, make_inputs
from compare import DTYPES, FORWARD, accumulate_type, assert_within, check, dtype_name, is_refused, run_flash


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("case", DENSE, ids=str)
def test_case(case: Case, dtype: torch.dtype, device: str):
    inputs = make_inputs(case, dtype, device)
    if is_refused(case, inputs):
        return
    ours = check(case, inputs, gradients=False)
    assert ours["out"].dtype == dtype
    assert ours["lse"].dtype == accumulate_type(dtype)
    assert ours["out"].is_contiguous() and ours["lse"].is_contiguous()


@pytest.mark.parametrize("rows", SIZES)
def test_every_pair_of_lengths(rows: int, device: str):
    for keys in SIZES:
        case = Case("", batch=1, rows=rows, keys=keys, head_dim=24)
        check(case, make_inputs(case, torch.float32, device), gradients=False)


@pytest.mark.parametrize("head_dim", range(1, 41))
def test_every_small_head_dim(head_dim: int, device: str):
    """Tails of vectors: every remainder of every vector width, in a narrow and a wide type."""
    case = Case("", batch=1, rows=19, keys=35, head_dim=head_dim)
    for dtype in (torch.float32, torch.bfloat16):
        check(case, make_inputs(case, dtype, device), gradients=False)


@pytest.mark.parametrize("case", [case for case in DENSE if case.dropout_p < 1.0][::3], ids=str)
def test_training_and_inference_give_the_same_bits(case: Case, device: str):
    inputs = make_inputs(case, torch.float32, device)
    inference = run_flash(case, inputs, gradients=False)
    training = run_flash(case, inputs, gradients=True)
    assert torch.equal(inference["out"], training["out"])
    assert torch.equal(inference["lse"], training["lse"])


@pytest.mark.parametrize("size", [1, 7, 16, 1000])
def test_one_query_row(size: int, device: str):
    """Decoding: the fewest rows against a long cache, with grouped heads."""
    case = Case("", batch=3, heads=8, kv_heads=2, rows=1, keys=size, head_dim=64)
    for dtype in (torch.float32, torch.bfloat16):
        check(case, make_inputs(case, dtype, device), gradients=False)


@pytest.mark.slow
@pytest.mark.parametrize("length", [4096, 4097, 5000])
def test_long_causal_rows(length: int, device: str):
    """A key block wholly in the future must be skipped, not clamped (sgl-project/sglang#22434)."""
    query, key, value = (torch.randn(1, 1, length, 64, device=device) for _ in range(3))
    out, lse = torch.ops.flash.attention_forward(query, key, value, window_right=0)
    assert out.isfinite().all() and lse.isfinite().all()
    for row in (0, 2000, length - 70):
        chunk = slice(row, row + 70)
        # Rows `row`.. of a causal call see one key more each: the same as an interval that is open by `row` to the right.
        truth, true_lse = reference.attention(query[:, :, chunk].double(), key.double(), value.double(), right=row)
        plain, plain_lse = reference.attention(query[:, :, chunk], key, value, right=row)
        assert_within("out", out[:, :, chunk], truth, plain, FORWARD, torch.float32)
        assert_within("lse", lse[:, :, chunk], true_lse, plain_lse, FORWARD, torch.float32)


def test_many_heads_and_batches(device: str):
    """More (batch, head) pairs than a grid dimension of 65535 holds (pytorch/pytorch#142228)."""
    for batch, heads in ((70000, 1), (1, 66000)):
        query, key, value = (torch.randn(batch, heads, 3, 8, device=device) for _ in range(3))
        out, _ = torch.ops.flash.attention_forward(query, key, value)
        truth, _ = reference.attention(query.double(), key.double(), value.double())
        plain, _ = reference.attention(query, key, value)
        assert_within("out", out, truth, plain, FORWARD, torch.float32)
