"""attn_mask: every broadcast shape, dtype and stride, its gradient, and what it must not do."""

from __future__ import annotations

import math

import pytest
import torch

import reference
from cases import Case, make_inputs
from compare import assert_same, check, poisoned

BATCH, HEADS, ROWS, KEYS, HEAD_DIM = 3, 4, 21, 37, 16
SHAPES = [
    (KEYS,), (1,), (1, KEYS), (ROWS, 1), (ROWS, KEYS), (1, 1, KEYS), (HEADS, 1, 1), (HEADS, ROWS, KEYS), (1, 1, 1, 1),
    (1, 1, 1, KEYS), (BATCH, 1, 1, KEYS), (1, HEADS, ROWS, KEYS), (BATCH, 1, ROWS, KEYS), (BATCH, HEADS, 1, KEYS),
    (BATCH, HEADS, ROWS, 1), (BATCH, HEADS, ROWS, KEYS),
]  # fmt: skip


def operands(device: str, dtype: torch.dtype = torch.float32, heads: int = HEADS):
    return [
        torch.randn(BATCH, heads, size, HEAD_DIM, device=device, dtype=dtype, requires_grad=True) for size in (ROWS, KEYS, KEYS)
    ]


def truth_of(leaves, mask, grad=None, **options):
    """out, and the gradients in the order of the leaves and the mask, in fp64."""
    double = [x.detach().double().requires_grad_() for x in leaves]
    if mask.is_floating_point():
        mask = mask.detach().double().requires_grad_()
    out, _ = reference.attention(*double, mask=mask, **options)
    wanted = [*double, mask] if mask.is_floating_point() else double
    return out, torch.autograd.grad(out, wanted, torch.ones_like(out) if grad is None else grad.double())


@pytest.mark.parametrize("size", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_every_broadcast_shape(kind: str, size: tuple[int, ...], device: str):
    """M1, M3: broadcast without being spread out; the gradient has the mask's own shape and is summed over the rest."""
    leaves = operands(device)
    mask = torch.randn(size, device=device)
    mask = mask > -1.0 if kind == "bool" else mask.requires_grad_()
    with poisoned(device):
        out = torch.ops.flash.attention(*leaves, mask)
        grad = torch.randn_like(out)
        mine = torch.autograd.grad(out, [*leaves, mask] if kind == "float" else leaves, grad)
    expected, true = truth_of(leaves, mask, grad)
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(mine, true, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=2e-5)
    if kind == "float":
        assert mine[3].shape == size and mine[3].dtype == mask.dtype


@pytest.mark.parametrize("size", [(BATCH, ROWS, KEYS), (ROWS - 1, KEYS), (KEYS + 1,), (2, 1, 1, KEYS), (1, 1, 1, ROWS, KEYS)])
def test_shapes_that_do_not_broadcast(size: tuple[int, ...], device: str):
    """M1: (N, L, S) with N != H is an error, and so is a mask that would enlarge the scores."""
    if len(size) == 5:
        size = (2, *size[1:])
    with pytest.raises(RuntimeError):
        torch.ops.flash.attention(*operands(device), torch.randn(size, device=device))


def test_mask_alone_requires_grad(device: str):
    """M2, pytorch/pytorch#148476."""
    query, key, value = (torch.randn(1, 1, 64, 16, device=device) for _ in range(3))
    mask = torch.randn(1, 1, 64, 64, device=device, requires_grad=True)
    torch.ops.flash.attention(query, key, value, mask).sum().backward()
    _, true = truth_of([query, key, value], mask)
    torch.testing.assert_close(mask.grad, true[3].float(), rtol=1e-4, atol=1e-5)


def test_scale_does_not_reach_the_mask(device: str):
    """M4: scale multiplies only query . key."""
    leaves = operands(device)
    mask = torch.randn(ROWS, KEYS, device=device)
    out = torch.ops.flash.attention(*leaves, mask, scale=0.05)
    expected, _ = truth_of(leaves, mask, scale=0.05)
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0, 1e-30])
def test_any_scale(scale: float, device: str):
    """M6, M7: negative is legal, zero is not "default"."""
    leaves = operands(device)
    mask = torch.rand(ROWS, KEYS, device=device) > 0.3
    out = torch.ops.flash.attention(*leaves, mask, scale=scale)
    gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))
    expected, true = truth_of(leaves, mask, scale=scale)
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(gradients, true, strict=True):
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-4, atol=1e-5)
    if scale == 0.0:
        assert not gradients[0].any() and not gradients[1].any()


def mask_layouts(mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """The values of a [BATCH, HEADS, ROWS, KEYS] mask in other memory orders."""
    wide = mask.new_ones(BATCH, HEADS, ROWS, 2 * KEYS)
    wide[..., ::2] = mask
    shifted = mask.new_ones(mask.numel() + 1)
    shifted[1:] = mask.flatten()
    return {
        "keys-first": mask.mT.contiguous().mT,
        "heads-last": mask.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
        "every-second-key": wide[..., ::2],
        "odd-address": shifted[1:].view(BATCH, HEADS, ROWS, KEYS),
    }


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_strides_of_the_mask_do_not_matter(kind: str, device: str):
    """L3: the last dimension need not be dense, and rows need not be a multiple of anything."""
    leaves = operands(device)
    mask = torch.randn(BATCH, HEADS, ROWS, KEYS, device=device)
    mask = mask > -0.5 if kind == "bool" else mask

    def run(attn_mask):
        attn_mask = attn_mask.detach()
        wanted = [*leaves, attn_mask.requires_grad_()] if kind == "float" else leaves
        out = torch.ops.flash.attention(*leaves, attn_mask)
        return out, *torch.autograd.grad(out, wanted, torch.ones_like(out))

    expected = run(mask)
    for name, view in mask_layouts(mask).items():
        for ours, theirs in zip(run(view), expected, strict=True):
            assert_same(ours, theirs, name)


def test_expanded_mask(device: str):
    """A mask expanded by the caller has stride 0 in memory and the full size in its gradient."""
    leaves = operands(device)
    base = torch.randn(ROWS, KEYS, device=device)
    expanded = base.expand(BATCH, HEADS, ROWS, KEYS).detach().requires_grad_()
    out = torch.ops.flash.attention(*leaves, expanded)
    (gradient,) = torch.autograd.grad(out.sum(), expanded)
    _, true = truth_of(leaves, base.expand(BATCH, HEADS, ROWS, KEYS).contiguous())
    assert gradient.shape == expanded.shape
    torch.testing.assert_close(gradient, true[3].float(), rtol=1e-4, atol=1e-5)


def test_bool_and_infinite_float_masks_agree(device: str):
    leaves = operands(device)
    keep = torch.rand(BATCH, 1, ROWS, KEYS, device=device) > 0.5
    keep[0, 0, 3] = False
    added = torch.zeros_like(keep, dtype=torch.float32).masked_fill(~keep, -math.inf)
    selected, summed = torch.ops.flash.attention(*leaves, keep), torch.ops.flash.attention(*leaves, added)
    assert_same(selected, summed)
    assert not selected[0, :, 3].any()


def test_gradient_of_a_mask_with_infinities(device: str):
    """Masked places get gradient 0, dead rows too; nothing becomes NaN."""
    leaves = operands(device)
    mask = torch.randn(BATCH, 1, ROWS, KEYS, device=device)
    mask[..., 5:9] = -math.inf
    mask[1, 0, 2] = -math.inf
    mask.requires_grad_()
    out = torch.ops.flash.attention(*leaves, mask)
    gradients = torch.autograd.grad(out, [*leaves, mask], torch.ones_like(out))
    _, true = truth_of(leaves, mask)
    for mine, theirs in zip(gradients, true, strict=True):
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-4, atol=2e-5)
    assert not gradients[3][..., 5:9].any() and not gradients[3][1, 0, 2].any()


@pytest.mark.parametrize("rows, keys", [(77, 133), (300, 300)])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 300])
def test_gradient_of_a_mask_beside_wide_heads(head_dim: int, rows: int, keys: int, device: str):
    """fp32: a score is a long sum; what it is off by reaches the gradient of the mask as it is."""
    case = Case("", batch=2, heads=4, kv_heads=2, rows=rows, keys=keys, head_dim=head_dim, mask="float:1HLS")
    check(case, make_inputs(case, torch.float32, device), gradients=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_mask_with_narrow_inputs(dtype: torch.dtype, device: str):
    """D9: a float32 mask with half inputs is legal; it is read, and its gradient returned, in float32."""
    leaves = operands(device, dtype)
    mask = torch.randn(1, HEADS, ROWS, KEYS, device=device, requires_grad=True)
    out = torch.ops.flash.attention(*leaves, mask)
    (gradient,) = torch.autograd.grad(out.sum(), mask)
    assert out.dtype == dtype and gradient.dtype == torch.float32
    expected, true = truth_of(leaves, mask)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(gradient.double(), true[3], rtol=5e-2, atol=5e-2)


def test_masks_with_other_ranks(device: str):
    """The mask may have fewer dimensions than query, and query other ranks than four."""
    mask = torch.randn(ROWS, KEYS, device=device)
    for leading in ((), (HEADS,), (2, BATCH, HEADS)):
        query, key, value = (torch.randn(*leading, size, HEAD_DIM, device=device) for size in (ROWS, KEYS, KEYS))
        out = torch.ops.flash.attention(query, key, value, mask)
        expected = torch.softmax(query @ key.mT / 4.0 + mask, -1) @ value
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_per_sample_mask_of_a_five_dimensional_call(device: str):
    query, key, value = (torch.randn(2, BATCH, HEADS, size, HEAD_DIM, device=device) for size in (ROWS, KEYS, KEYS))
    mask = torch.randn(2, 1, HEADS, 1, KEYS, device=device, requires_grad=True)
    out = torch.ops.flash.attention(query, key, value, mask)
    (gradient,) = torch.autograd.grad(out.sum(), mask)
    wide = mask.detach().clone().requires_grad_()
    expected = torch.softmax(query @ key.mT / 4.0 + wide, -1) @ value
    (true,) = torch.autograd.grad(expected.sum(), wide)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, true, rtol=1e-4, atol=1e-4)
