"""torch.ops.flash.attention takes SDPA's place, argument by argument: same values, same ranks, same errors.

The other side is torch's own math backend: on GPUs the fused ones differ from the documentation in several places.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import flash_attn_ext
from compare import FORWARD, GRADIENT, TINY, assert_within

flash = torch.ops.flash.attention


def sdpa(*arguments, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*arguments, **options)


def random(*size: int, device: str = "cpu", dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.float64).to(dtype).to(device).requires_grad_()


def both(leaves, call, tolerance: float = 1e-9) -> torch.Tensor:
    """call(function) for both functions: outputs and all gradients agree. Returns ours."""
    ours, theirs = call(flash), call(sdpa)
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    grad = torch.randn_like(ours)
    for name, mine, true in zip(
        ("query", "key", "value", "mask"),
        torch.autograd.grad(ours, leaves, grad),
        torch.autograd.grad(theirs, leaves, grad),
        strict=False,
    ):
        assert mine.shape == true.shape, name
        torch.testing.assert_close(mine, true, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")
    return ours


def test_signature_is_sdpas():
    ours = flash.default._schema
    theirs = torch.ops.aten.scaled_dot_product_attention.default._schema
    described = [[(a.name, str(a.type), a.default_value, a.kwarg_only) for a in s.arguments] for s in (ours, theirs)]
    assert described[0] == described[1]
    assert [str(r.type) for r in ours.returns] == [str(r.type) for r in theirs.returns]


@pytest.mark.parametrize(
    "query, key, value",
    [
        ((5, 8), (7, 8), (7, 8)),
        ((3, 5, 8), (3, 7, 8), (3, 7, 8)),
        ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
        ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 8)),
        ((1, 2, 2, 3, 5, 8), (1, 2, 2, 3, 7, 8), (1, 2, 2, 3, 7, 8)),
        ((4, 3, 8), (4, 4, 6, 8), (4, 4, 6, 8)),  # ranks differ: batch dimensions broadcast as in matmul
        ((4, 4, 3, 8), (6, 8), (6, 8)),
        ((3, 8), (2, 4, 6, 8), (2, 4, 6, 8)),
        ((2, 8, 16, 8), (2, 1, 16, 8), (2, 1, 16, 8)),  # one head for all, without enable_gqa
        ((2, 1, 16, 8), (2, 8, 16, 8), (2, 8, 16, 8)),
        ((1, 3, 5, 8), (4, 3, 7, 8), (4, 3, 7, 8)),
        ((4, 3, 5, 8), (1, 3, 7, 8), (4, 3, 7, 8)),
        ((4, 3, 5, 8), (4, 3, 7, 8), (1, 1, 7, 8)),
        ((2, 1, 3, 5, 8), (1, 4, 3, 7, 8), (2, 4, 3, 7, 8)),
        ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 13)),  # Ev != E
        ((4, 4, 4, 8), (4, 4, 4, 8), (4, 4, 4, 16)),
        ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_ranks_and_broadcasting(query, key, value, causal: bool, device: str):
    leaves = [random(*size, device=device) for size in (query, key, value)]
    both(leaves, lambda function: function(*leaves, is_causal=causal))


@pytest.mark.parametrize("heads, kv_heads", [(8, 2), (6, 3), (4, 4), (5, 1)])
@pytest.mark.parametrize("rank", [3, 4, 5])
def test_enable_gqa(heads: int, kv_heads: int, rank: int, device: str):
    leading = (2, 2, 2)[: rank - 3]
    leaves = [random(*leading, h, size, 8, device=device) for h, size in ((heads, 5), (kv_heads, 9), (kv_heads, 9))]
    both(leaves, lambda function: function(*leaves, enable_gqa=True))


@pytest.mark.parametrize("scale", [None, 1.0, 0.25, -0.3, 0.0])
def test_scale(scale, device: str):
    leaves = [random(2, 3, size, 7, device=device) for size in (5, 6, 6)]
    tolerance = 1e-9
    if scale == 0.0:  # the math backend multiplies by sqrt(scale) and loses nothing here but the gradient's 0 * inf
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        out = flash(*leaves, scale=0.0)
        torch.testing.assert_close(out, leaves[2].mean(-2, keepdim=True).expand_as(out))
        return
    both(leaves, lambda function: function(*leaves, scale=scale), tolerance)


@pytest.mark.parametrize("rows, keys", [(5, 5), (2, 9), (9, 2), (1, 8), (8, 1), (70, 130), (130, 70)])
def test_is_causal_is_top_left(rows: int, keys: int, device: str):
    leaves = [random(1, 2, size, 8, device=device) for size in (rows, keys, keys)]
    both(leaves, lambda function: function(*leaves, is_causal=True))


@pytest.mark.parametrize("mask", [(9,), (5, 9), (3, 5, 9), (1, 1, 9), (2, 1, 1, 9), (2, 3, 5, 9), (1, 3, 1, 1)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_attn_mask(mask, kind: str, device: str):
    leaves = [random(2, 3, size, 8, device=device) for size in (5, 9, 9)]
    attn_mask = random(*mask, device=device)
    if kind == "bool":
        attn_mask = attn_mask.detach() > -0.5
        both(leaves, lambda function: function(*leaves, attn_mask))
    else:
        both([*leaves, attn_mask], lambda function: function(*leaves, attn_mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_positional_arguments(dtype: torch.dtype, device: str):
    query = random(2, 2, 6, 8, device=device, dtype=dtype)
    out = flash(query, query, query, None, 0.0, True, scale=0.5, enable_gqa=False)
    torch.testing.assert_close(out, sdpa(query, query, query, None, 0.0, True, scale=0.5), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torchs_own_samples(dtype: torch.dtype, device: str):
    """The samples that torch tests SDPA with in its operator database."""
    samples = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    count = 0
    for sample in samples.sample_inputs_scaled_dot_product_attention(None, device, dtype, requires_grad=True):
        if sample.kwargs.get("dropout_p", 0.0) > 0.0:
            out = flash(sample.input, *sample.args, **sample.kwargs)
            assert out.shape == sdpa(sample.input, *sample.args, **sample.kwargs).shape
            continue
        tensors = [sample.input, *sample.args]

        def run(function, kind, tensors=tensors, options=sample.kwargs):
            leaves = [x.detach().to(kind).requires_grad_() for x in tensors]
            out = function(*leaves, **options)
            return [out, *torch.autograd.grad(out.sum(), leaves)]

        ours, plain, truth = run(flash, dtype), run(sdpa, dtype), run(sdpa, torch.float64)
        # Backward makes P again from an lse as large as the scores, of which the accumulate type keeps its epsilon.
        score = (sample.input.norm(dim=-1).max() * sample.args[0].norm(dim=-1).max()).item() / math.sqrt(sample.input.size(-1))
        kept = 1.0 + score * torch.finfo(dtype).eps / TINY[dtype]
        largest = kept * max(gradient.abs().max().item() for gradient in truth[1:])
        for name, mine, rough, true in zip(("out", "dq", "dk", "dv", "dmask"), ours, plain, truth, strict=False):
            assert_within(name, mine, true, rough, FORWARD if name == "out" else GRADIENT, dtype, largest)
        count += 1
    assert count >= 4


# What SDPA refuses: (name, arguments, options, text that both share).
def refusals() -> list:
    q = torch.randn(2, 4, 5, 8)
    return [
        ("mixed dtypes", (q, q.half(), q), {}, r"Expected query, key, and value to have the same dtype, but got query\.dtype: float key\.dtype: .*Half and value\.dtype: float instead"),
        ("mixed devices", (q, q.to("meta"), q), {}, r"Expected query, key, and value to have the same device type, but got query\.device: cpu key\.device: meta and value\.device: cpu instead"),
        ("one dimension", (q[0, 0, 0], q[0, 0], q[0, 0]), {}, r"Expected query, key, and value to all be  at least 2 dimensional, but got query\.dim: 1 key\.dim: 2 and value\.dim: 2 instead"),
        ("integer mask", (q, q, q, torch.ones(5, 5, dtype=torch.int32)), {}, r"Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask\.dtype: int and  query\.dtype: float instead"),
        ("double mask", (q, q, q, torch.ones(5, 5, dtype=torch.float64)), {}, r"Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask\.dtype: double and  query\.dtype: float instead"),
        ("mask and causal", (q, q, q, torch.ones(5, 5, dtype=torch.bool), 0.0, True), {}, r"Explicit attn_mask should not be set when is_causal=True"),
        ("negative dropout", (q, q, q, None, -0.1), {}, r"dropout probability has to be between 0 and 1, but got -0\.1"),
        ("dropout over one", (q, q, q, None, 1.5), {}, r"dropout probability has to be between 0 and 1, but got 1\.5"),
        ("heads that do not divide", (q, q[:, :3], q[:, :3]), {"enable_gqa": True}, r"Number of heads in key and value must divide the number of heads in "),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name, arguments, options, text", refusals(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_errors_are_sdpas(name: str, arguments, options: dict, text: str):
    if name != "negative dropout":  # the math backend drops nothing then, and says nothing
        with pytest.raises(RuntimeError, match=text):
            sdpa(*arguments, **options)
    with pytest.raises(RuntimeError, match=text):
        flash(*arguments, **options)


@pytest.mark.parametrize(
    "name, query, key, value, options, words",
    [
        ("head dims differ", (2, 4, 5, 8), (2, 4, 5, 9), (2, 4, 5, 9), {}, ("query", "key", "8", "9")),
        ("lengths differ", (2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 7, 8), {}, ("key", "value", "6", "7")),
        ("heads differ", (2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8), {}, ("enable_gqa", "4", "2")),
        ("batches differ", (2, 4, 5, 8), (3, 4, 5, 8), (3, 4, 5, 8), {}, ("2", "3")),
        ("kv heads differ", (2, 4, 5, 8), (2, 2, 5, 8), (2, 4, 5, 8), {"enable_gqa": True}, ("key", "value", "2", "4")),
        ("mask too long", (2, 4, 5, 8), (2, 4, 5, 8), (2, 4, 5, 8), {"mask": (5, 6)}, ("attn_mask", "5", "6")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_shapes_that_do_not_fit(name: str, query, key, value, options: dict, words, device: str):
    """SDPA's texts come from inside matmul here; ours name the argument and the sizes. The type is the same."""
    options = dict(options)
    tensors = [torch.randn(size, device=device) for size in (query, key, value)]
    mask = torch.randn(options.pop("mask"), device=device) if "mask" in options else None
    if name != "kv heads differ":  # the math backend takes each count that divides; the documentation asks for equal ones
        with pytest.raises(RuntimeError):
            sdpa(*tensors, mask, **options)
    with pytest.raises(RuntimeError) as error:
        flash(*tensors, mask, **options)
    for word in words:
        assert word in str(error.value).lower(), f"{word!r} is not in: {error.value}"


def test_one_error_lists_every_reason():
    """Three things are wrong; one exception names all of them."""
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 9), torch.randn(2, 4, 7, 9)
    with pytest.raises(RuntimeError) as error:
        torch.ops.flash.attention_forward(query, key, value, softcap=-1.0)
    text = str(error.value).lower()
    assert "key" in text and "value" in text and "softcap" in text, text


@pytest.mark.parametrize(
    "change, words",
    [
        ({"seed": None, "dropout_p": 0.5}, ("seed", "dropout_p")),
        ({"alibi_slopes": torch.ones(3)}, ("alibi_slopes", "3")),
        ({"sinks": torch.ones(3)}, ("sinks", "3")),
        ({"softcap": -2.0}, ("softcap", "-2")),
        ({"query": torch.randn(4, 5, 8)}, ("query", "3")),
        ({"seed": torch.rand(3, dtype=torch.float64), "dropout_p": 0.5}, ("seed",)),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors_of_the_inner_operator(change: dict, words):
    arguments = {name: torch.randn(2, 4, 5, 8) for name in ("query", "key", "value")} | change
    with pytest.raises(RuntimeError) as error:
        torch.ops.flash.attention_forward(**arguments)
    for word in words:
        assert word in str(error.value).lower(), f"{word!r} is not in: {error.value}"


def test_integer_inputs_are_refused():
    query = torch.ones(1, 1, 4, 8, dtype=torch.int64)
    with pytest.raises(RuntimeError):
        flash(query, query, query)


@pytest.mark.parametrize("rows, keys", [(5, 5), (3, 8), (8, 3)])
def test_causal_bias(rows: int, keys: int, device: str):
    """torch.nn.attention.bias masks answer only to SDPA itself: the Python function unwraps them."""
    query, key, value = (torch.randn(2, 3, size, 8, device=device) for size in (rows, keys, keys))
    for make, causal in ((causal_upper_left, "top_left"), (causal_lower_right, "bottom_right")):
        bias = make(rows, keys)
        out = flash_attn_ext.attention(query, key, value, bias)
        assert torch.equal(out, flash_attn_ext.attention(query, key, value, causal=causal))
        if rows <= keys:
            torch.testing.assert_close(out, F.scaled_dot_product_attention(query, key, value, bias), rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
            flash_attn_ext.attention(query, key, value, bias, causal=True)
    with pytest.raises(ValueError, match="CausalBias"):
        flash_attn_ext.attention(query, key, value, causal_upper_left(rows + 1, keys))


def test_python_function_is_the_operator(device: str):
    """Same numbers for the same call; heads group by default, as `enable_gqa` says."""
    query = torch.randn(2, 4, 9, 8, device=device)
    key, value = (torch.randn(2, 2, 9, 8, device=device) for _ in range(2))
    mask = torch.randn(9, 9, device=device)
    for ours, theirs in (
        (flash_attn_ext.attention(query, key, value, mask), flash(query, key, value, mask, enable_gqa=True)),
        (
            flash_attn_ext.attention(query, key, value, causal=True, scale=0.3),
            flash(query, key, value, is_causal=True, scale=0.3, enable_gqa=True),
        ),
    ):
        assert torch.equal(ours, theirs)
    with pytest.raises(RuntimeError, match="enable_gqa"):
        flash_attn_ext.attention(query, key, value, enable_gqa=False)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 2, 3)], ids=["rank2", "rank3", "rank4", "rank5"])
def test_python_function_takes_every_rank(leading: tuple[int, ...], device: str):
    """With the options that only the inner operator has."""
    query, key, value = (torch.randn(*leading, size, 8, device=device) for size in (5, 7, 7))
    out, lse = flash_attn_ext.attention(query, key, value, window=(3, 2), softcap=2.0, return_lse=True)
    assert out.shape == (*leading, 5, 8) and lse.shape == (*leading, 5)
    score = 2.0 * torch.tanh(query @ key.mT / math.sqrt(8) / 2.0)
    distance = torch.arange(7, device=device) - torch.arange(5, device=device)[:, None]
    score = score.masked_fill((distance < -3) | (distance > 2), -math.inf)
    torch.testing.assert_close(out, torch.softmax(score, -1) @ value, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, torch.logsumexp(score, -1), rtol=1e-5, atol=1e-5)


def test_result_is_never_an_alias():
    query = torch.randn(1, 1, 1, 8)
    for out in (
        flash(query, query, query),
        flash(query[..., :0, :], query, query),
        flash(query, query[..., :0, :], query[..., :0, :]),
    ):
        assert out.untyped_storage().data_ptr() != query.untyped_storage().data_ptr() or out.numel() == 0
        assert not out._is_view()
