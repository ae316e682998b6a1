"""What sequence-parallel libraries call of flash_attn: private forward and backward functions, partial results added up."""

from __future__ import annotations

import math

import pytest
import torch

from flash_attn_ext import merge
from flash_attn_ext.compat import flash_attn_3, flash_attn_interface
from flash_attn_layout import Sequences, expected, normal


def test_dropout_is_the_same_in_the_private_backward(device: str):
    """out is linear in v under one mask: <dout, out> = <dv, v>."""
    q, k, v = (normal(2, 33, 4, 16, device=device, grad=False) for _ in range(3))
    out, lse, _, state = flash_attn_interface._flash_attn_forward(q, k, v, 0.4, 0.25, False, -1, -1, 0.0, None, False)
    assert not torch.equal(out, flash_attn_interface._flash_attn_forward(q, k, v, 0.4, 0.25, False)[0])
    dout = torch.randn_like(out)
    dv = torch.empty_like(v)
    flash_attn_interface._flash_attn_backward(
        dout, q, k, v, out, lse, None, None, dv, 0.4, 0.25, False, -1, -1, 0.0, None, False, rng_state=state
    )
    torch.testing.assert_close((dout * out).sum(), (dv * v).sum())
    with pytest.raises(ValueError, match="rng_state"):
        flash_attn_interface._flash_attn_backward(dout, q, k, v, out, lse, None, None, dv, 0.4, 0.25, False)


@pytest.mark.parametrize("causal", [False, True])
def test_ring_through_the_private_functions(causal: bool, device: str):
    """Forward parts are merged; backward of each part gets the merged out and lse, as sequence-parallel libraries do it."""
    parts, length = 4, 8
    q, k, v = (normal(2, parts * length, 4, 16, device=device) for _ in range(3))
    true, _ = expected(q, k, v, causal=causal, window=(-1, -1))
    dout = torch.randn_like(true)
    true_grads = torch.autograd.grad(true, (q, k, v), dout)
    chunks = [[x.detach()[:, i * length : (i + 1) * length] for x in (q, k, v)] for i in range(parts)]
    grads = [[torch.zeros_like(x) for x in chunk] for chunk in chunks]
    for i, (row, _, _) in enumerate(chunks):
        out = lse = None
        seen = range(i + 1) if causal else range(parts)
        for j in seen:
            part, part_lse, _, _ = flash_attn_interface._flash_attn_forward(
                row, *chunks[j][1:], dropout_p=0.0, softmax_scale=0.25, causal=causal and i == j, window_size_left=-1,
                window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
            )  # fmt: skip
            part = part.transpose(1, 2)
            out, lse = (part, part_lse) if out is None else merge(out, lse, part, part_lse)
        out = out.transpose(1, 2)
        torch.testing.assert_close(out, true[:, i * length : (i + 1) * length].detach())
        for j in seen:
            dq, dk, dv = (torch.empty_like(x) for x in chunks[j])
            flash_attn_interface._flash_attn_backward(
                dout[:, i * length : (i + 1) * length], row, *chunks[j][1:], out, lse, dq, dk, dv, 0.0, 0.25,
                causal and i == j, -1, -1, 0.0, None, False,
            )  # fmt: skip
            grads[i][0] += dq
            grads[j][1] += dk
            grads[j][2] += dv
    for which in range(3):
        torch.testing.assert_close(torch.cat([g[which] for g in grads], 1), true_grads[which])


def test_private_varlen_functions(device: str):
    at = Sequences((5, 17), (9, 20), device)
    k, v = (x.detach() for x in at.kv.unbind(1))
    true, true_lse = at.expected(causal=True, window=(6, -1))
    out, lse, _, _ = flash_attn_interface._flash_attn_varlen_forward(at.q.detach(), k, v, *at.lengths, 0.0, 0.25, True, 6, 0)
    torch.testing.assert_close((out, lse), (true.detach(), true_lse.detach()))
    dout = torch.randn_like(out)
    dq, dk, dv = torch.empty_like(at.q), torch.empty_like(k), torch.empty_like(v)
    flash_attn_interface._flash_attn_varlen_backward(
        dout, at.q.detach(), k, v, out, lse, dq, dk, dv, *at.lengths, 0.0, 0.25, True, 6, 0, 0.0, None, False
    )
    true_q, true_kv = torch.autograd.grad(true, (at.q, at.kv), dout)
    torch.testing.assert_close(dq, true_q)
    torch.testing.assert_close(torch.stack([dk, dv], 1), true_kv)


def test_combine(device: str):
    q, k, v = (torch.randn(2, n, 4, 16, device=device) for n in (5, 40, 40))
    parts = [
        flash_attn_3.flash_attn_func(q, k[:, i : i + 10], v[:, i : i + 10], return_attn_probs=True) for i in range(0, 40, 10)
    ]
    parts.append((torch.full_like(q, math.nan), torch.full((2, 4, 5), -math.inf, device=device)))  # nothing was seen
    out, lse = flash_attn_3.flash_attn_combine(
        torch.stack([p[0] for p in parts]), torch.stack([p[1].transpose(1, 2) for p in parts])
    )
    true, true_lse = expected(q, k, v, False, (-1, -1))
    torch.testing.assert_close(out, true, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, true_lse.transpose(1, 2), rtol=1e-4, atol=1e-5)
