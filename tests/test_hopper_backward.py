"""The Hopper backward beside the general one: both families, forced, against the reference, where tiles, windows and sequences end."""

from __future__ import annotations

import itertools
import math
import threading

import pytest
import torch

import flash_attn_ext
import reference
from cases import Case, Inputs, make_inputs
from compare import check, dtype_name, poisoned, run_flash, run_reference

HALF_TYPES = (torch.bfloat16, torch.float16)
FAMILIES = ("sm90", "sm80")

SHAPES = [
    Case("square", rows=300, head_dim=64),
    Case("narrow", rows=130, keys=257, head_dim=40),
    Case("square-128", rows=256, head_dim=128, right=0),
    Case("wide-keys", rows=130, keys=400, head_dim=128, right=0, bottom_right=True),
    Case("long-rows", rows=500, keys=130, head_dim=128, right=0),
    Case("rows-see-nothing", rows=400, keys=130, head_dim=64, right=0, bottom_right=True),
    Case("grouped", heads=6, kv_heads=2, rows=200, keys=333, head_dim=128, right=0),
    Case("one-kv-head", heads=5, kv_heads=1, rows=130, head_dim=64),
    Case("padded-96", rows=200, head_dim=96, right=0),
    Case("padded-192", rows=200, head_dim=192, right=0),
    Case("square-256", rows=200, keys=150, head_dim=256),
    Case("grouped-256", heads=4, kv_heads=2, rows=150, keys=300, head_dim=256, right=0, bottom_right=True),
    Case("value-dim", rows=150, head_dim=128, value_dim=64, right=0),
    Case("window", rows=600, keys=500, head_dim=128, left=100, right=30),
    Case("narrow-window", rows=500, head_dim=64, left=3, right=0),
    Case("left-window", rows=500, keys=600, head_dim=128, left=70, bottom_right=True),
    Case("ahead", rows=300, head_dim=64, left=-5, right=40),
    Case("window-256", rows=300, head_dim=256, left=64, right=64),
    Case("softcap", rows=300, head_dim=128, right=0, softcap=3.0),
    Case("softcap-64", rows=300, head_dim=64, softcap=1.5),
    Case("softcap-256", rows=200, head_dim=256, softcap=1.5, left=90),
    Case("sinks", heads=4, kv_heads=2, rows=300, head_dim=128, right=0, sinks=True),
    Case("scale", rows=200, head_dim=64, scale=0.5, right=0),
]


@pytest.fixture
def family(request: pytest.FixtureRequest, hopper_kernels: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """Forces a family of kernels."""
    monkeypatch.setenv("FLASH_ATTN_EXT_KERNEL", request.param)
    return request.param


both = pytest.mark.parametrize("family", FAMILIES, indirect=True)
hopper = pytest.mark.parametrize("family", ["sm90"], indirect=True)
pytestmark = pytest.mark.cuda


@both
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=dtype_name)
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_case(case: Case, dtype: torch.dtype, family: str):
    check(case, make_inputs(case, dtype, "cuda"), gradients=True, grad_lse=SHAPES.index(case) % 2 == 0)


@hopper
@pytest.mark.parametrize("case", [case for case in SHAPES if not case.softcap], ids=str)
def test_deterministic(case: Case, family: str):
    """Right, and the same bits in every run."""
    torch.use_deterministic_algorithms(True)
    try:
        inputs = make_inputs(case, torch.bfloat16, "cuda")
        expected = check(case, inputs, gradients=True, grad_lse=True)
        for _ in range(3):
            again = check(case, inputs, gradients=True, grad_lse=True)
            for name, tensor in expected.items():
                assert torch.equal(again[name], tensor), name
    finally:
        torch.use_deterministic_algorithms(False)


# So many tiles that those of a head take turns (sm90::passes_on).
TURNS = [
    Case("full-64", batch=4, heads=16, rows=2900, head_dim=64),
    Case("causal-64", batch=4, heads=16, rows=2881, keys=2950, head_dim=64, right=0),
    Case("full-128", batch=4, heads=16, rows=1999, keys=2111, head_dim=128),
    Case("causal-128", batch=4, heads=16, rows=2111, keys=2047, head_dim=128, right=0, bottom_right=True),
    Case("window-128", batch=4, heads=16, rows=2000, head_dim=96, left=1500, right=70),
    Case("grouped-128", batch=16, heads=16, kv_heads=4, rows=2000, head_dim=128, right=0),
    Case("full-256", batch=2, heads=16, rows=3190, head_dim=256),
    Case("grouped-256", batch=8, heads=8, kv_heads=4, rows=3100, keys=1765, head_dim=192),
]


@hopper
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=dtype_name)
@pytest.mark.parametrize("case", TURNS, ids=str)
def test_in_turns(case: Case, dtype: torch.dtype, family: str):
    """Deterministic gradients of many tiles: dK and dV bit for bit those of the default, dQ but for the order of its sums; the same in
    every run, whatever the memory held before."""
    inputs = make_inputs(case, dtype, "cuda")
    tensors = (inputs.query, inputs.key, inputs.value)
    span = {name: case.options[name] for name in ("window_left", "window_right", "bottom_right")}
    assert "take turns" in torch.ops.flash.explain(*tensors, **span, deterministic=True)
    out, lse = torch.ops.flash.attention_forward(*tensors, **case.options)

    def gradients(deterministic: bool) -> tuple[torch.Tensor, ...]:
        return torch.ops.flash.attention_backward(
            inputs.grad_out, None, *tensors, out, lse, None, None, None, None, [True] * 3 + [False] * 2,
            **case.options, deterministic=deterministic,
        )[:3]  # fmt: skip

    with poisoned("cuda"):
        first, default = gradients(True), gradients(False)
    torch.testing.assert_close(first[0].float(), default[0].float(), rtol=2**-7, atol=1e-5 * default[0].abs().max().item())
    assert torch.equal(first[1], default[1]) and torch.equal(first[2], default[2])
    for _ in range(5):
        for again, once in zip(gradients(True), first, strict=True):
            assert torch.equal(again, once)


@hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("right", [None, 0], ids=["full", "causal"])
def test_every_tail_with_very_negative_scores(head_dim: int, right: int | None, family: str, monkeypatch: pytest.MonkeyPatch):
    """2^(0 - lse) of a key past the end overflows: it must not be met by anything but a zero that stays one. Such rows see one key
    alone. Its probability is 1 only where the softmax follows every maximum; relative to another reference it is rounded to 16 bits,
    and delta with it, by up to 2^-9 for the whole row, which keys and queries far from 0 carry into dQ and dK. So the measure is the
    other family, which takes its reference elsewhere, and twice the root of the sum of the squares of what that rounding does."""
    for length in (*range(1, 20, 6), *range(60, 70, 3), *range(100, 140, 9), 191, 193, 255, 257):
        rows = max(length, 2)
        query, key = (sign * 4.0 + 0.1 * torch.randn(1, 2, rows, head_dim, dtype=torch.float64) for sign in (-1, 1))
        case = Case("", batch=1, heads=2, rows=rows, head_dim=head_dim, right=right, scale=1.0)
        inputs = make_inputs(case, torch.bfloat16, "cuda")
        inputs.query, inputs.key = (x.to("cuda", torch.bfloat16) for x in (query, key))
        truth = run_reference(case, inputs, torch.float64, gradients=True)
        assert truth["lse"].max() < -500
        errors = {}
        for name in ("sm80", family):
            monkeypatch.setenv("FLASH_ATTN_EXT_KERNEL", name)
            ours = run_flash(case, inputs, gradients=True)
            errors[name] = {of: (ours[of].double() - truth[of]).norm().item() for of in ("dquery", "dkey", "dvalue")}
        slack = rounded_delta(inputs, truth["lse"], right)
        for of, error in errors[family].items():
            allowed = 1.5 * errors["sm80"][of] + 1e-3 * truth[of].norm().item() + slack[of]
            assert error <= allowed, f"{length} keys: {of}: {errors}, {slack}"


def rounded_delta(inputs: Inputs, lse: torch.Tensor, right: int | None) -> dict[str, float]:
    """Twice the expected norm of what delta, off by 2^-9 of itself, adds to gradients (scale 1, no mask)."""
    query, key, value, grad_out = (x.double() for x in (inputs.query, inputs.key, inputs.value, inputs.grad_out))
    probability = (query @ key.mT - lse[..., None]).exp()
    if right is not None:
        probability = probability.tril(right)
    delta = 2.0**-9 * ((probability @ value) * grad_out).sum(-1, keepdim=True)
    return {
        "dquery": 2 * (delta * (probability @ key)).norm().item(),
        "dkey": 2 * (delta * probability * query.norm(dim=-1, keepdim=True)).norm().item(),
        "dvalue": 0.0,
    }


@hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_more_tiles_than_multiprocessors(head_dim: int, family: str):
    """Blocks go on to further tiles, short and long, empty and full."""
    for rows, keys, right in ((65, 300, 0), (300, 65, 0), (130, 129, None)):
        case = Case("", batch=9, heads=40, rows=rows, keys=keys, head_dim=head_dim, right=right)
        inputs = make_inputs(case, torch.bfloat16, "cuda")
        for _ in range(3):
            check(case, inputs, gradients=True)


@both
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_packed_neighbours_and_what_lies_beyond(head_dim: int, deterministic: bool, family: str):
    """NaN in one sequence and past the last one reaches no other: gradients are those of the sequences by themselves."""
    rows, keys = (70, 1, 200, 130, 64), (130, 9, 33, 257, 128)
    heads, kv_heads, poison = 4, 2, 2
    cu_q, cu_k = ([0, *itertools.accumulate(lengths)] for lengths in (rows, keys))
    normal = lambda *size: torch.randn(*size, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    query, key, value, grad = (
        normal(total + 40, count, head_dim)
        for total, count in ((cu_q[-1], heads), (cu_k[-1], kv_heads), (cu_k[-1], kv_heads), (cu_q[-1], heads))
    )
    for tensor, cu in ((query, cu_q), (key, cu_k), (value, cu_k), (grad, cu_q)):
        tensor[cu[-1] :] = math.nan
        tensor[cu[poison] : cu[poison + 1]] = math.nan
    leaves = [x.requires_grad_() for x in (query, key, value)]
    lengths = [torch.tensor(cu, dtype=torch.int32, device="cuda") for cu in (cu_q, cu_k)]
    out, _ = torch.ops.flash.attention_varlen_forward(
        *leaves, *lengths, max(rows), max(keys), window_right=0, deterministic=deterministic
    )
    ours = torch.autograd.grad(out, leaves, grad)
    for index in range(len(rows)):
        row, column = slice(cu_q[index], cu_q[index + 1]), slice(cu_k[index], cu_k[index + 1])
        parts = (row, column, column)
        if index == poison:
            assert all(gradient[part].isnan().any() for gradient, part in zip(ours, parts, strict=True))
            continue
        alone = [
            x.detach()[part].double().transpose(0, 1)[None].requires_grad_() for x, part in zip(leaves, parts, strict=True)
        ]
        truth = reference.attention(*alone, right=0, bottom_right=True)[0]
        expected = torch.autograd.grad(truth, alone, grad[row].double().transpose(0, 1)[None])
        for name, gradient, part, true in zip("qkv", ours, parts, expected, strict=True):
            mine = gradient[part].double().transpose(0, 1)[None]
            assert (mine - true).norm() <= 1e-2 * true.norm() + 1e-6, f"sequence {index}: d{name}"
    for gradient, cu in zip(ours, (cu_q, cu_k, cu_k), strict=True):
        assert not gradient[cu[-1] :].any()


@hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("right", [None, 0], ids=["full", "causal"])
def test_as_exact_as_the_flash_of_torch(head_dim: int, right: int | None, family: str):
    """Root mean square errors of dQ, dK and dV, at most 1.1 times those of SDPA's FlashAttention-2 on the same data."""
    leaves = [torch.randn(2, 4, 1024, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    grad = torch.randn_like(leaves[0])
    exact = [x.detach().double().requires_grad_() for x in leaves]
    truth = torch.autograd.grad(reference.attention(*exact, right=right)[0], exact, grad.double())
    ours = torch.autograd.grad(torch.ops.flash.attention(*leaves, is_causal=right == 0), leaves, grad)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        rival = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=right == 0)
    theirs = torch.autograd.grad(rival, leaves, grad)
    for name, true, mine, other in zip("qkv", truth, ours, theirs, strict=True):
        error, allowed = ((x.double() - true).norm().item() for x in (mine, other))
        assert error <= 1.1 * allowed, f"d{name}: {error:.3e}, flash {allowed:.3e}"


@hopper
def test_only_some_gradients(family: str):
    case = Case("", heads=4, kv_heads=2, rows=200, keys=150, head_dim=128, right=0)
    inputs = make_inputs(case, torch.bfloat16, "cuda")
    out, lse = torch.ops.flash.attention_forward(inputs.query, inputs.key, inputs.value, **case.options)

    def gradients(wanted: list[bool], deterministic: bool) -> tuple:
        return torch.ops.flash.attention_backward(
            inputs.grad_out, None, inputs.query, inputs.key, inputs.value, out, lse, None, None, None, None,
            [*wanted, False, False], **case.options, deterministic=deterministic,
        )[:3]  # fmt: skip

    for deterministic in (False, True):
        everything = gradients([True] * 3, deterministic)
        for wanted in itertools.product([False, True], repeat=3):
            for asked, gradient, expected in zip(wanted, gradients(list(wanted), deterministic), everything, strict=True):
                assert (gradient is not None) == asked
                if asked:
                    torch.testing.assert_close(gradient, expected, rtol=2e-2, atol=2e-2)


@hopper
def test_in_a_thread_that_has_not_used_cuda(family: str):
    """The tensor maps need a context. autograd's own thread may meet this call first, too."""
    query, grad = (torch.randn(2, 2, 200, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    results: list = []

    def run() -> None:
        out, lse = torch.ops.flash.attention_forward(query, query, query)
        results.append(
            torch.ops.flash.attention_backward(
                grad, None, query, query, query, out, lse, None, None, None, None, [True] * 3 + [False] * 2
            )
        )

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert results and results[0][0].isfinite().all()


@hopper
def test_says_why_not(family: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FLASH_ATTN_EXT_KERNEL")
    query = torch.empty(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16)
    backward = flash_attn_ext.explain(query, query, query, alibi_slopes=torch.ones(2, device="cuda")).split(
        "The backward pass"
    )[1]
    assert "sm80" in backward and "they take no alibi_slopes" in backward
