"""The autograd node: derivatives of every argument to second order, hooks, checkpoints, threads, copies."""

from __future__ import annotations

import copy
import io
import math
import pickle
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flash_attn_ext
import reference
from cases import Case, make_inputs

pytestmark = pytest.mark.usefixtures("deterministic")  # gradcheck asks for reproducible gradients, on a GPU too
forward = torch.ops.flash.attention_forward
attention = torch.ops.flash.attention

SMALL = {"batch": 2, "heads": 2, "rows": 4, "keys": 5, "head_dim": 3}
GRADCHECK = [
    Case("plain", **SMALL),
    Case("causal", **SMALL, right=0),
    Case("bottom-right", **(SMALL | {"rows": 6}), right=0, bottom_right=True),
    Case("window", **(SMALL | {"rows": 8}), left=1, right=1),
    Case("gqa", **(SMALL | {"heads": 4}), kv_heads=2),
    Case("value-dim", **SMALL, value_dim=5),
    Case("softcap", **SMALL, softcap=1.5, scale=1.3),
    Case("alibi", **SMALL, alibi="BH"),
    Case("sinks", **SMALL, sinks=True),
    Case("sinks-dead-rows", **(SMALL | {"rows": 7, "keys": 3}), sinks=True, right=0, bottom_right=True),
    Case("mask", **SMALL, mask="same:BHLS"),
    Case("mask-broadcast", **SMALL, mask="same:B1L1"),
    Case("mask-row", **SMALL, mask="same:111S"),
    Case("bool", **SMALL, mask="bool:B1LS"),
    Case("dropout", **SMALL, dropout_p=0.4),
    Case(
        "everything", batch=2, heads=4, kv_heads=2, rows=5, keys=6, head_dim=3, value_dim=2, left=4, right=2, scale=0.7,
        softcap=2.0, alibi="H", sinks=True, mask="same:1HLS", dropout_p=0.3,
    ),
]  # fmt: skip


def checkable(case: Case, device: str):
    """The call as a function of its differentiable inputs, which are query, key, value, and mask and sinks if they are there."""
    inputs = make_inputs(case, torch.float64, device)
    names = ["query", "key", "value"]
    names += ["mask"] if inputs.mask is not None and inputs.mask.is_floating_point() else []
    names += ["sinks"] if inputs.sinks is not None else []
    leaves = [getattr(inputs, name).requires_grad_() for name in names]

    def function(*tensors):
        given = dict(zip(names, tensors, strict=True))
        out, lse = forward(
            given["query"], given["key"], given["value"], given.get("mask", inputs.mask), inputs.alibi_slopes,
            given.get("sinks"), inputs.seed, **case.options, deterministic=True,
        )  # fmt: skip
        return out, lse.masked_fill(lse == -math.inf, 0.0)  # a constant for dead rows: differences of -inf are NaN

    return function, leaves


@pytest.mark.parametrize("case", GRADCHECK, ids=str)
def test_first_derivative(case: Case, device: str):
    function, leaves = checkable(case, device)
    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("case", GRADCHECK, ids=str)
def test_second_derivative(case: Case, device: str):
    function, leaves = checkable(case, device)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=case.name not in ("mask", "sinks"))


@pytest.mark.parametrize("place", range(5))
def test_derivatives_of_one_argument(place: int, device: str):
    """One argument alone requires grad, to second order: query, key, value, mask, sinks."""
    function, leaves = checkable(GRADCHECK[-1].with_(dropout_p=0.0), device)
    for index, leaf in enumerate(leaves):
        leaf.requires_grad_(index == place)
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


def test_third_derivative(device: str):
    query, key, value = (torch.randn(1, 1, 3, 2, dtype=torch.float64, device=device, requires_grad=True) for _ in range(3))

    def third(function):
        (first,) = torch.autograd.grad(function(query, key, value).pow(2).sum(), query, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), key, create_graph=True)
        return torch.autograd.grad(second.pow(2).sum(), (query, key, value))

    for ours, theirs in zip(third(attention), third(lambda *x: reference.attention(*x)[0]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_public_operator_and_python_function(device: str):
    leaves = [torch.randn(2, 4, 3, dtype=torch.float64, device=device, requires_grad=True) for _ in range(3)]
    mask = torch.randn(4, 4, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *x: attention(*x, scale=0.7), (*leaves, mask))
    assert torch.autograd.gradgradcheck(lambda *x: attention(*x, is_causal=True), leaves)
    sinks = torch.randn(2, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda q, k, v, m, s: flash_attn_ext.attention(q, k, v, m, sinks=s, softcap=2.0, return_lse=True),
        (*leaves, mask, sinks),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradient_penalty(dtype: torch.dtype, device: str):
    """F1, pytorch/pytorch#116350: grad with create_graph, a penalty on it, then backward."""

    def penalty(function, kind):
        torch.manual_seed(1)
        leaves = [torch.randn(2, 4, 32, 16, device=device).to(dtype).to(kind).requires_grad_() for _ in range(3)]
        out = function(*leaves)
        (gradient,) = torch.autograd.grad(out, leaves[0], torch.ones_like(out), create_graph=True)
        return torch.autograd.grad(((gradient.norm(dim=-1) - 1) ** 2).mean(), leaves)

    truth = penalty(lambda *x: reference.attention(*x)[0], torch.float64)
    plain = penalty(lambda *x: reference.attention(*x)[0], dtype)
    for ours, true, rough in zip(penalty(attention, dtype), truth, plain, strict=True):
        allowed = 3 * (rough.double() - true).abs().max() + 1e-6 * (1 + true.abs().max())
        assert (ours.double() - true).abs().max() <= allowed


def small(device: str, count: int = 3, grad: bool = True, size=(2, 3, 9, 8)) -> list[torch.Tensor]:
    return [torch.randn(size, device=device, requires_grad=grad) for _ in range(count)]


def test_slopes_that_require_grad_are_refused(device: str):
    """F10: no silent missing gradient."""
    query, key, value = small(device)
    slopes = torch.ones(3, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="alibi_slopes"):
        forward(query, key, value, alibi_slopes=slopes)
    with torch.no_grad():
        forward(query, key, value, alibi_slopes=slopes)


def test_graph_can_be_kept_or_is_gone(device: str):
    leaves = small(device)
    out = attention(*leaves)
    grad = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    second = torch.autograd.grad(out, leaves, grad)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, leaves, grad)


def test_changed_inputs_are_noticed(device: str):
    leaves = small(device)
    copies = [leaf.clone() for leaf in leaves]
    out = attention(*copies)
    with torch.no_grad():
        copies[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    out, _ = forward(*leaves)
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_grad_modes(device: str):
    leaves = small(device)
    with torch.no_grad():
        assert not attention(*leaves).requires_grad
    with torch.inference_mode():
        out = attention(*leaves)
    assert out.is_inference()
    made = [leaf.detach() for leaf in leaves]
    assert not attention(*made).requires_grad
    out, lse = forward(*leaves)
    assert out.requires_grad and lse.requires_grad and out.grad_fn is lse.grad_fn
    assert "Flash" in type(out.grad_fn).__name__ or "Flash" in out.grad_fn.name()


def test_hooks_on_saved_tensors(device: str):
    """Every saved tensor passes the hooks, and what they give back is used."""
    leaves = small(device)
    expected = torch.autograd.grad(attention(*leaves).sum(), leaves)
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.double().cpu()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.float().to(device)):
        out = attention(*leaves)
    assert len(packed) >= 5  # query, key, value, out, lse
    for ours, theirs in zip(torch.autograd.grad(out.sum(), leaves), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_save_on_cpu(device: str):
    leaves = small(device)
    expected = torch.autograd.grad(attention(*leaves, None, 0.0, True).sum(), leaves)
    with torch.autograd.graph.save_on_cpu(pin_memory=device == "cuda"):
        out = attention(*leaves, None, 0.0, True)
    for ours, theirs in zip(torch.autograd.grad(out.sum(), leaves), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_tensor_hooks(device: str):
    leaves = small(device)
    seen = []
    leaves[0].register_hook(lambda grad: seen.append("query") or grad * 2)
    out = attention(*leaves)
    out.register_hook(lambda grad: seen.append("out"))
    out.grad_fn.register_prehook(lambda grads: seen.append("before"))
    out.grad_fn.register_hook(lambda inputs, outputs: seen.append("after"))
    out.sum().backward()
    assert sorted(seen) == ["after", "before", "out", "query"]
    copies = [leaf.detach().requires_grad_() for leaf in leaves]
    attention(*copies).sum().backward()
    assert torch.equal(leaves[0].grad, 2 * copies[0].grad) and torch.equal(leaves[1].grad, copies[1].grad)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_checkpoint(reentrant: bool, dropout_p: float, device: str):
    """R5, allenai/OLMo-core#828: the recomputation draws the mask that forward drew."""
    leaves = small(device, size=(2, 3, 70, 16))

    def layer(query, key, value):
        return attention(query * 2, key, value, None, dropout_p, True)

    def gradients(run):
        torch.manual_seed(11)
        for leaf in leaves:
            leaf.grad = None
        out = run(*leaves)
        out.pow(2).sum().backward()
        return out.detach(), *(leaf.grad for leaf in leaves)

    plain = gradients(layer)
    again = gradients(lambda *x: checkpoint(layer, *x, use_reentrant=reentrant))
    for ours, theirs in zip(again, plain, strict=True):
        assert torch.equal(ours, theirs)


def test_selective_checkpoint(device: str):
    """attention_forward on the save list runs once; off it, twice."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            Count.calls += function is torch.ops.flash.attention_forward.default
            return function(*arguments, **(keywords or {}))

    leaves = small(device)
    for saved, expected in (([torch.ops.flash.attention_forward.default], 1), ([torch.ops.aten.mm.default], 2)):
        Count.calls = 0
        with Count():
            out = checkpoint(
                lambda *x: attention(*x).pow(2), *leaves, use_reentrant=False,
                context_fn=lambda saved=saved: create_selective_checkpoint_contexts(saved),
            )  # fmt: skip
            out.sum().backward()
        assert Count.calls == expected


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = torch.nn.Linear(16, 48)
        self.sinks = torch.nn.Parameter(torch.randn(2))
        self.attend = flash_attn_ext.attention

    def forward(self, x):
        query, key, value = self.projection(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return self.attend(query, key, value, causal=True, sinks=self.sinks).transpose(1, 2).flatten(2)


def test_modules_can_be_copied_and_pickled(device: str):
    block = Block().to(device)
    x = torch.randn(2, 5, 16, device=device)
    block(x).sum().backward()
    expected = block(x)
    buffer = io.BytesIO()
    torch.save(block, buffer)
    buffer.seek(0)
    for clone in (copy.deepcopy(block), pickle.loads(pickle.dumps(block)), torch.load(buffer, weights_only=False)):
        assert torch.equal(clone(x), expected)
        clone(x).sum().backward()
        assert clone.sinks.grad is not None


def test_anomaly_mode(device: str):
    leaves = small(device)
    with torch.autograd.detect_anomaly(check_nan=True):
        attention(*leaves).sum().backward()
    query, key, value = small(device)
    with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError, match="returned nan"):
        attention(query, key, value).mul(math.nan).sum().backward()


def test_threads(device: str):
    """Four threads go backward through one graph, and each runs forward on its own."""
    leaves = small(device, size=(2, 3, 40, 16))
    out = attention(*leaves)
    expected = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    failures = []

    def work():
        try:
            for _ in range(5):
                mine = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
                assert torch.equal(attention(*leaves), out)
                assert all(torch.equal(ours, theirs) for ours, theirs in zip(mine, expected, strict=True))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_graph_frees_its_memory(device: str):
    """No reference cycle between out and its node: tensors die with the graph."""
    import gc
    import weakref

    gc.disable()
    try:
        leaves = small(device)
        out, lse = forward(*leaves)
        watched = weakref.ref(out)
        del out, lse
        assert watched() is None
    finally:
        gc.enable()
    before = len(gc.get_objects())
    for _ in range(20):
        (gradient,) = torch.autograd.grad(attention(*leaves).sum(), leaves[0], create_graph=True)
        gradient.sum().backward()
    gc.collect()
    assert len(gc.get_objects()) < before + 500
