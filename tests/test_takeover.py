"""activate(), deactivate(), sdpa(): torch's own SDPA on these kernels."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    sdpa_kernel,
)

import flash_attn_ext
import reference
from flash_attn_ext import _takeover


@pytest.fixture
def on_cpu():
    """The overrides on the CPU key, which torch leaves empty: everything but the choice of backend can be tried without a GPU."""
    overrides = _takeover.Overrides("CPU")
    yield
    overrides.remove()


def leaves(*sizes: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    return [torch.randn(*size, device=device).to(dtype).requires_grad_() for size in sizes]


def test_import_activates_nothing():
    code = (
        "import flash_attn_ext; from torch.nn.attention import *; "
        "assert current_flash_attention_impl() is None and 'flash_attn_ext' in list_flash_attention_impls()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_on_and_off_again():
    assert "flash_attn_ext" in list_flash_attention_impls()
    for _ in range(2):
        flash_attn_ext.activate()
        assert current_flash_attention_impl() == "flash_attn_ext"
        flash_attn_ext.deactivate()
        assert current_flash_attention_impl() is None
    activate_flash_attention_impl("flash_attn_ext")  # by torch's own function
    flash_attn_ext.activate()
    flash_attn_ext.deactivate()
    flash_attn_ext.deactivate()
    assert current_flash_attention_impl() is None


def test_context_restores_what_was_active():
    with flash_attn_ext.sdpa():
        assert current_flash_attention_impl() == "flash_attn_ext"
    assert current_flash_attention_impl() is None
    flash_attn_ext.activate()
    with pytest.raises(KeyError), flash_attn_ext.sdpa():
        raise KeyError
    assert current_flash_attention_impl() == "flash_attn_ext"
    flash_attn_ext.deactivate()


def test_preference_is_restored():
    before = torch._C._get_sdp_priority_order()
    with flash_attn_ext.sdpa(prefer=True):
        assert torch._C._get_sdp_priority_order()[0] == SDPBackend.FLASH_ATTENTION.value
        assert sorted(torch._C._get_sdp_priority_order()) == sorted(before)
    assert torch._C._get_sdp_priority_order() == before


def test_preference_outlives_an_inner_context():
    """activate(prefer=True) is in force again behind a `with sdpa()`, and deactivate() still gives torch its own order back."""
    flash = SDPBackend.FLASH_ATTENTION.value
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        before = torch._C._get_sdp_priority_order()
        assert before[0] != flash
        flash_attn_ext.activate(prefer=True)
        for prefer in (False, True):
            with flash_attn_ext.sdpa(prefer=prefer):
                assert torch._C._get_sdp_priority_order()[0] == flash
            assert current_flash_attention_impl() == "flash_attn_ext"
            assert torch._C._get_sdp_priority_order() == [flash, *(backend for backend in before if backend != flash)]
        flash_attn_ext.deactivate()
        assert torch._C._get_sdp_priority_order() == before and current_flash_attention_impl() is None


def test_threads_may_switch():
    """The operator behind the overrides runs without Python's lock."""

    def switch() -> None:
        for _ in range(300):
            for on in (True, False):
                torch.ops.flash.override_sdpa("CPU", on)

    threads = [threading.Thread(target=switch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("name", list(_takeover._KNOWN))
def test_unknown_schemas_are_refused(name: str, monkeypatch: pytest.MonkeyPatch):
    schema = getattr(torch.ops.aten, name).default._schema
    assert _takeover.unknown_schema(name, schema) == ""
    text = str(schema)
    more = torch._C.parse_schema(text.replace("float? scale=None", "float? scale=None, Tensor? colour=None"))
    fewer = torch._C.parse_schema(text.replace(", *, float? scale=None, ", ", *, ").replace(", *, float? scale=None)", ")"))
    assert "colour" in _takeover.unknown_schema(name, more) and "scale" in _takeover.unknown_schema(name, fewer)
    turned = torch._C.parse_schema(text.replace("Tensor query, Tensor key", "Tensor key, Tensor query"))
    assert "in the order" in _takeover.unknown_schema(name, turned)  # its arguments are taken by place
    monkeypatch.setitem(_takeover._KNOWN, name, (_takeover._KNOWN[name][0], 4))
    with pytest.raises(RuntimeError, match=f"cannot take over.*aten::{name}.*returns"):
        flash_attn_ext.activate()
    assert current_flash_attention_impl() is None


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "keys", "kv_heads"), [(20, 20, 4), (9, 30, 2), (30, 9, 1)])
def test_sdpa_operators(rows: int, keys: int, kv_heads: int, causal: bool, on_cpu):
    """Values, lse, gradients through torch's own derivative; causal is bottom-right here."""
    q, k, v = leaves((2, 4, rows, 16), (2, kv_heads, keys, 16), (2, kv_heads, keys, 16))
    result = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=0.3)
    true, true_lse = reference.attention(q, k, v, right=0 if causal else None, bottom_right=True, scale=0.3)
    torch.testing.assert_close(result[0], true)
    torch.testing.assert_close(result[1], true_lse)
    assert result[4:6] == (rows, keys) and result[6].dtype == torch.uint64 and result[6].shape == (2,)
    grad = torch.randn_like(true)
    for ours, theirs in zip(
        torch.autograd.grad(result[0], (q, k, v), grad), torch.autograd.grad(true, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_foreign_results_in_backward(on_cpu):
    """Context parallel hands the out and lse of all keys to the backward of some of them."""
    q, k, v = leaves(*[(1, 2, 24, 16)] * 3)
    out, lse = reference.attention(q, k, v)
    grad = torch.randn_like(out)
    true = torch.autograd.grad(out, (k, v), grad)
    for part in (slice(0, 12), slice(12, 24)):
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k[:, :, part], v[:, :, part], out.detach(), lse.detach(), None, None, 24, 12, 0.0, False,
            torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64),
        )  # fmt: skip
        torch.testing.assert_close(gradients[1:], tuple(x[:, :, part] for x in true))


@pytest.mark.parametrize("packed", [False, True])
def test_flash_operators(packed: bool, on_cpu):
    """_flash_attention_forward and its derivative: [B, L, H, D], or [total, H, D] with lengths; windows count from the bottom right."""
    q, k, v = leaves(*[(2, 20, 4, 16)] * 3)
    true, _ = reference.attention(*(x.transpose(1, 2) for x in (q, k, v)), left=6, right=2, bottom_right=True)
    true = true.transpose(1, 2)
    cu = torch.tensor([0, 20, 40], dtype=torch.int32) if packed else None
    inputs = [x.flatten(0, 1) if packed else x for x in (q, k, v)]
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *inputs, cu, cu, 20, 20, 0.0, False, False, window_size_left=6, window_size_right=2
    )
    torch.testing.assert_close(out.reshape(true.shape), true)
    assert lse.shape == ((4, 40) if packed else (2, 4, 20))
    grad = torch.randn_like(true)
    for ours, theirs in zip(
        torch.autograd.grad(out, (q, k, v), grad.reshape(out.shape)), torch.autograd.grad(true, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_strides_are_those_that_torch_promises(on_cpu):
    """Inductor relies on the strides of the fake kernels, which stay torch's."""
    for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)):
        sizes = [(2, 4, 20)[i] for i in order]
        q, k, v = (torch.randn(*sizes, 16).permute(*(order.index(i) for i in range(3)), 3) for _ in range(3))
        ours = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)
        fake = torch.ops.aten._scaled_dot_product_flash_attention(*(x.to("meta") for x in (q, k, v)))
        assert ours[0].stride() == fake[0].stride() and ours[1].stride() == fake[1].stride()


def test_what_is_not_taken_goes_to_torch(on_cpu):
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(NotImplementedError, match="no other kernel"):
        torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.5)
    x, cu = q[0].transpose(0, 1), torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="no other kernel"):
        torch.ops.aten._flash_attention_forward(x, x, x, cu, cu, 8, 8, 0.0, False, False, seqused_k=cu[1:])


# --- on a GPU -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_plain_sdpa_runs_on_it(head_dim: int, causal: bool, cuda: str):
    """F.scaled_dot_product_attention inside sdpa(), forward and backward, and through torch.compile; dropout keeps torch's kernels."""
    q, k, v = leaves(*[(2, 4, 257, head_dim)] * 3, dtype=torch.bfloat16, device=cuda)
    true, _ = reference.attention(q.double(), k.double(), v.double(), right=0 if causal else None)
    grad = torch.randn_like(true)
    true_grads = torch.autograd.grad(true, (q, k, v), grad)
    compiled = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal) * 1.0)
    with flash_attn_ext.sdpa():
        for function in (lambda *x: F.scaled_dot_product_attention(*x, is_causal=causal), compiled):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                out = function(q, k, v)
                grads = torch.autograd.grad(out, (q, k, v), grad.to(out.dtype))
            names = {event.name for event in profile.events()}
            assert {"flash::attention_forward", "flash::attention_backward"} <= names
            torch.testing.assert_close(out.double(), true, rtol=2e-2, atol=2e-2)
            for ours, theirs in zip(grads, true_grads, strict=True):
                assert (ours - theirs).abs().max() <= 0.05 * theirs.abs().max()
        dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, is_causal=causal)
        torch.autograd.grad(dropped.sum(), (q, k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, is_causal=causal), out, rtol=2e-2, atol=2e-2)


def test_nested_tensors_run_on_it(cuda: str):
    values = [torch.randn(n, 4, 64, device=cuda, dtype=torch.float16) for n in (5, 130, 17)]
    nested = torch.nested.nested_tensor(values, layout=torch.jagged).transpose(1, 2)
    with flash_attn_ext.sdpa():
        out = F.scaled_dot_product_attention(nested, nested, nested, is_causal=True)
    for ours, x in zip(out.transpose(1, 2).unbind(), values, strict=True):
        true, _ = reference.attention(*[x.transpose(0, 1).double()] * 3, right=0)
        torch.testing.assert_close(ours.double(), true.transpose(0, 1), rtol=1e-2, atol=5e-3)
