"""Dropout: which elements go, that both directions agree on them, and that only the seed decides."""

from __future__ import annotations

import pytest
import torch

import flash_attn_ext
import reference
from cases import Case, make_inputs
from compare import check, dtype_name

forward = torch.ops.flash.attention_forward
dropout_mask = torch.ops.flash.dropout_mask


def make_seed(device: str) -> torch.Tensor:
    return torch.rand(2, dtype=torch.float64).to(device)


@pytest.mark.parametrize("size", [(1, 1, 1, 1), (2, 3, 17, 33), (1, 2, 64, 64), (3, 1, 100, 40)], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999, 1.0])
def test_mask_is_the_published_generator(size, p: float, device: str):
    """Philox written again in numpy gives the same bits, element by element."""
    seed = make_seed(device)
    keep = dropout_mask(seed, size, p)
    assert keep.dtype == torch.bool and keep.shape == size
    assert torch.equal(keep.cpu(), reference.dropout_keeps(seed, size, p))


@pytest.mark.parametrize("rows, keys", [(65, 130), (200, 200), (1, 300)])
@pytest.mark.parametrize("right", [None, 0])
def test_forward_drops_what_dropout_mask_says(rows: int, keys: int, right, device: str):
    """Values are the identity, so that out shows every single weight; any tiling must give this mask."""
    query, key = torch.randn(2, 2, rows, 16, device=device), torch.randn(2, 2, keys, 16, device=device)
    value = torch.eye(keys, device=device).expand(2, 2, keys, keys)
    seed = make_seed(device)
    out, lse = forward(query, key, value, seed=seed, dropout_p=0.3, window_right=right)
    kept, full_lse = forward(query, key, value, window_right=right)
    keep = dropout_mask(seed, (2, 2, rows, keys), 0.3)
    visible = kept > 0
    assert torch.equal((out > 0)[visible], keep[visible])
    torch.testing.assert_close(out[visible & keep], kept[visible & keep] / 0.7, rtol=1e-5, atol=1e-7)
    assert torch.equal(lse, full_lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_long_rows(dtype: torch.dtype, device: str):
    """R1, pytorch/pytorch#102038: wrong gradients with dropout, causal and more than 64 keys."""
    case = Case("", batch=2, heads=4, rows=200, head_dim=32, right=0, dropout_p=0.3)
    check(case, make_inputs(case, dtype, device), gradients=True, grad_lse=True)


def test_backward_uses_the_mask_of_forward(device: str):
    """out is linear in value for a fixed mask: <grad, out> = <dvalue, value>."""
    query, key = (torch.randn(2, 3, 100, 16, device=device, dtype=torch.float32) for _ in range(2))
    value = torch.randn(2, 3, 100, 16, device=device, requires_grad=True)
    out = torch.ops.flash.attention(query, key, value, None, 0.4)
    grad = torch.randn_like(out)
    (dvalue,) = torch.autograd.grad(out, value, grad)
    torch.testing.assert_close((grad * out).sum(), (dvalue * value).sum(), rtol=1e-4, atol=1e-3)


def test_grouped_heads_have_masks_of_their_own(device: str):
    """The mask belongs to the query head, not to the kv head."""
    query = torch.ones(1, 4, 64, 8, device=device)
    key = torch.ones(1, 1, 64, 8, device=device)
    value = torch.eye(64, device=device)[None, None]
    seed = make_seed(device)
    out, _ = forward(query, key, value, seed=seed, dropout_p=0.5)
    assert torch.equal(out > 0, dropout_mask(seed, (1, 4, 64, 64), 0.5))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.25, 0.5, 0.9])
def test_kept_fraction(p: float, device: str):
    """Within five standard deviations of 1 - p over half a million draws, overall and per row, column and head."""
    size = (4, 2, 256, 256)
    keep = dropout_mask(make_seed(device), size, p).double()
    deviation = (p * (1 - p)) ** 0.5
    assert abs(keep.mean().item() - (1 - p)) < 5 * deviation / keep.numel() ** 0.5 + 2**-16
    for dims in ((0, 1, 2), (0, 1, 3), (2, 3)):
        mean = keep.mean(dims)
        count = keep.numel() // mean.numel()
        assert (mean - (1 - p)).abs().max() < 5.5 * deviation / count**0.5 + 2**-16


def test_elements_are_independent(device: str):
    """Neighbours in every direction, and the places that share one call of the generator, do not correlate."""
    keep = dropout_mask(make_seed(device), (4, 4, 256, 256), 0.5).double() * 2 - 1
    for shift in (
        (0, 0, 0, 1),
        (0, 0, 1, 0),
        (0, 0, 0, 8),
        (0, 0, 8, 0),
        (0, 0, 8, 8),
        (0, 0, 16, 0),
        (0, 0, 0, 16),
        (0, 1, 0, 0),
        (1, 0, 0, 0),
    ):
        rolled = keep.roll(shift, (0, 1, 2, 3))
        assert abs((keep * rolled).mean().item()) < 5 / keep.numel() ** 0.5, shift


def test_mean_is_preserved(device: str):
    query, key, value = (torch.randn(1, 1, 32, 16, device=device) for _ in range(3))
    expected, _ = forward(query, key, value)
    outs = [forward(query, key, value, seed=make_seed(device), dropout_p=0.3)[0] for _ in range(400)]
    error = torch.stack(outs).mean(0) - expected
    assert (error.abs() < 6 * torch.stack(outs).std(0) / 20 + 1e-3).all()


def test_seeds(device: str):
    """R4: calls in a row differ, manual_seed brings them back, other random numbers go on as before."""
    query = torch.randn(2, 2, 40, 16, device=device)

    def call():
        return torch.ops.flash.attention(query, query, query, None, 0.5)

    torch.manual_seed(3)
    first, second = call(), call()
    after = torch.rand(3, device=device)
    torch.manual_seed(3)
    assert torch.equal(call(), first) and not torch.equal(first, second)
    assert torch.equal(call(), second)
    assert torch.equal(torch.rand(3, device=device), after)
    torch.manual_seed(4)
    assert not torch.equal(call(), first)
    state = torch.random.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    third = call()
    (torch.random.set_rng_state if device == "cpu" else torch.cuda.set_rng_state)(state)
    assert torch.equal(call(), third)


def test_no_random_number_is_drawn_without_dropout(device: str):
    query = torch.randn(2, 2, 40, 16, device=device)
    torch.manual_seed(3)
    expected = torch.rand(3, device=device)
    torch.manual_seed(3)
    torch.ops.flash.attention(query, query, query, None, 0.0)
    assert torch.equal(torch.rand(3, device=device), expected)


def test_both_seed_words_matter(device: str):
    seed = make_seed(device)
    size = (1, 1, 64, 64)
    base = dropout_mask(seed, size, 0.5)
    for place in (0, 1):
        other = seed.clone()
        other[place] = torch.rand((), dtype=torch.float64)
        assert not torch.equal(dropout_mask(other, size, 0.5), base)


def test_applied_in_eval_too(device: str):
    """R6: like SDPA, the operator knows no training flag."""
    query = torch.randn(1, 1, 64, 16, device=device)
    with torch.no_grad(), torch.inference_mode():
        out = torch.ops.flash.attention(query, query, query, None, 0.5)
    assert not torch.allclose(out, torch.ops.flash.attention(query, query, query))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_everything_dropped(dtype: torch.dtype, device: str):
    """R7: p = 1 gives zeros and zero gradients, never 0 * inf."""
    leaves = [torch.randn(2, 2, 20, 16, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    out = torch.ops.flash.attention(*leaves, None, 1.0)
    assert not out.any()
    out.backward(torch.randn_like(out))
    assert all(not leaf.grad.any() for leaf in leaves)


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan"), float("inf")])
def test_wrong_probabilities(p: float):
    query = torch.randn(1, 1, 4, 8)
    with pytest.raises(RuntimeError, match="dropout probability has to be between 0 and 1, but got"):
        torch.ops.flash.attention(query, query, query, None, p)
    with pytest.raises(RuntimeError, match="dropout"):
        forward(query, query, query, seed=torch.rand(2, dtype=torch.float64), dropout_p=p)


def test_python_function_draws_like_the_operator(device: str):
    """The same seed gives the same mask with and without the options of the inner operator."""
    query = torch.randn(2, 2, 40, 16, device=device)
    torch.manual_seed(5)
    plain = flash_attn_ext.attention(query, query, query, dropout_p=0.4)
    torch.manual_seed(5)
    out, _ = flash_attn_ext.attention(query, query, query, dropout_p=0.4, return_lse=True)
    assert torch.equal(plain, out)


@pytest.mark.cuda
def test_devices_agree(cuda: str):
    """The same seed drops the same elements on the CPU and on the GPU."""
    seed = make_seed("cpu")
    for size in ((2, 3, 100, 77), (1, 1, 1, 513)):
        assert torch.equal(dropout_mask(seed, size, 0.3), dropout_mask(seed.to(cuda), size, 0.3).cpu())
    query, key, value = (torch.randn(2, 3, size, 32) for size in (100, 77, 77))
    ours = forward(query, key, value, seed=seed, dropout_p=0.3)[0]
    theirs = forward(query.to(cuda), key.to(cuda), value.to(cuda), seed=seed.to(cuda), dropout_p=0.3)[0]
    torch.testing.assert_close(ours, theirs.cpu(), rtol=1e-4, atol=1e-5)
