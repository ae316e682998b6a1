"""Packed sequences against one dense call per sequence."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import flash_attn_ext
import reference
from cases import PACKED, Packed
from compare import DTYPES, accumulate_type, assert_same, compare, differentiate, dtype_name, poisoned

varlen = torch.ops.flash.attention_varlen_forward


class Call:
    """Inputs of one packed case; rows and keys past the last sequence hold NaN."""

    def __init__(self, case: Packed, dtype: torch.dtype, device: str):
        generator = torch.Generator().manual_seed(len(case.name))
        keys = case.rows if case.keys is None else case.keys
        value_dim = case.head_dim if case.value_dim is None else case.value_dim
        self.case, self.dtype, self.device = case, dtype, device
        self.cu_q = [0, *itertools.accumulate(case.rows)]
        self.cu_k = [0, *itertools.accumulate(keys)]
        self.longest = max(case.rows), max(keys)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64)

        def padded(used: int, heads: int, dim: int) -> torch.Tensor:
            tensor = torch.full((used + case.tail, heads, dim), math.nan, dtype=torch.float64)
            tensor[:used] = normal(used, heads, dim)
            return tensor.to(dtype).to(device)

        wide = accumulate_type(dtype)
        self.leaves = {
            "query": padded(self.cu_q[-1], case.heads, case.head_dim),
            "key": padded(self.cu_k[-1], case.kv_heads, case.head_dim),
            "value": padded(self.cu_k[-1], case.kv_heads, value_dim),
        }
        if case.sinks:
            self.leaves["sinks"] = normal(case.heads).to(wide).to(device)
        slopes = {"": None, "H": (case.heads,), "BH": (len(case.rows), case.heads)}[case.alibi]
        self.slopes = None if slopes is None else (0.02 * normal(*slopes).abs()).to(wide).to(device)
        self.seed = torch.rand(2, generator=generator, dtype=torch.float64).to(device) if case.dropout_p else None
        self.grad_out = padded(self.cu_q[-1], case.heads, value_dim)
        self.grad_lse = normal(case.heads, self.cu_q[-1] + case.tail).to(wide).to(device)

    def lengths(self) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.tensor(cu, dtype=torch.int32, device=self.device) for cu in (self.cu_q, self.cu_k))

    def flash(self, leaves):
        return varlen(
            leaves["query"], leaves["key"], leaves["value"], *self.lengths(), *self.longest, self.slopes,
            leaves.get("sinks"), self.seed, **self.case.options,
        )  # fmt: skip

    def reference(self, leaves):
        case, keep = self.case, None
        if self.seed is not None:
            size = (len(case.rows), case.heads, *self.longest)
            keep = torch.ops.flash.dropout_mask(self.seed, size, case.dropout_p)
        slopes = None if self.slopes is None else self.slopes.to(leaves["query"].dtype)
        return reference.attention_varlen(
            leaves["query"], leaves["key"], leaves["value"], self.cu_q, self.cu_k, alibi_slopes=slopes, keep=keep,
            left=case.left, right=case.right, bottom_right=case.bottom_right, softcap=case.softcap,
            sinks=leaves.get("sinks"), dropout_p=case.dropout_p,
        )  # fmt: skip

    def run(self, function, dtype: torch.dtype, with_lse: bool):
        cast = {name: tensor.to(dtype) for name, tensor in self.leaves.items()}
        if function == self.flash and "sinks" in cast:
            cast["sinks"] = self.leaves["sinks"]
        return differentiate(function, cast, self.grad_out, self.grad_lse if with_lse else None)

    def check(self, with_lse: bool) -> dict[str, torch.Tensor]:
        with poisoned(self.device):
            ours = self.run(self.flash, self.dtype, with_lse)
        plain = self.run(self.reference, self.dtype, with_lse)
        truth = self.run(self.reference, torch.float64, with_lse)
        single = self.run(self.reference, accumulate_type(self.dtype), False)["lse"]
        compare(ours, truth, plain, single, self.dtype)
        return ours


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("case", PACKED, ids=str)
def test_case(case: Packed, dtype: torch.dtype, device: str):
    """V1, V2, V4, U3: values, gradients, zeros past the end although everything there holds NaN."""
    call = Call(case, dtype, device)
    ours = call.check(with_lse=PACKED.index(case) % 2 == 0)
    rows, keys = call.cu_q[-1], call.cu_k[-1]
    assert not ours["out"][rows:].any() and (ours["lse"][:, rows:] == -math.inf).all()
    assert not ours["dquery"][rows:].any() and not ours["dkey"][keys:].any() and not ours["dvalue"][keys:].any()


def test_equals_dense_calls_bit_by_bit(device: str):
    """A sequence does not notice its neighbours."""
    rows, keys = (33, 1, 70), (65, 9, 70)
    query, key, value = (torch.randn(sum(n), 4, 32, device=device) for n in (rows, keys, keys))
    cu_q, cu_k = (torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device=device) for n in (rows, keys))
    out, lse = varlen(query, key, value, cu_q, cu_k, 70, 70, window_right=0)
    for index in range(3):
        row, first = slice(*cu_q[index : index + 2].tolist()), slice(*cu_k[index : index + 2].tolist())
        dense = [x.transpose(0, 1)[None] for x in (query[row], key[first], value[first])]
        expected, expected_lse = torch.ops.flash.attention_forward(*dense, window_right=0, bottom_right=True)
        assert_same(out[row], expected[0].transpose(0, 1))
        assert_same(lse[:, row], expected_lse[0])


def test_strides(device: str):
    """Views of a packed projection, and heads-first memory, give the same bits."""
    packed = torch.randn(100, 3, 4, 32, device=device)
    cu = torch.tensor([0, 40, 100], dtype=torch.int32, device=device)
    expected = None
    for make in (
        torch.Tensor.contiguous,
        lambda x: x,
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.mT.contiguous().mT,
    ):
        leaves = [make(x).detach().requires_grad_() for x in packed.unbind(1)]
        out, _ = varlen(*leaves, cu, cu, 60, 60)
        result = (out, *torch.autograd.grad(out, leaves, torch.linspace(-1, 1, out.numel(), device=device).view(out.shape)))
        expected = expected or result
        for ours, theirs in zip(result, expected, strict=True):
            assert_same(ours, theirs)


def test_upper_bound_of_the_lengths(device: str):
    """max_seqlen may be larger than any sequence."""
    query = torch.randn(30, 2, 16, device=device)
    cu = torch.tensor([0, 10, 30], dtype=torch.int32, device=device)
    exact, loose = varlen(query, query, query, cu, cu, 20, 20), varlen(query, query, query, cu, cu, 1000, 777)
    assert_same(exact[0], loose[0]), assert_same(exact[1], loose[1])


@pytest.mark.parametrize("causal", [False, True, "top_left", "bottom_right"])
def test_python_function(causal, device: str):
    """causal=True is bottom-right here, as every caller of packed attention expects."""
    query, key = torch.randn(12, 2, 8, device=device), torch.randn(20, 2, 8, device=device)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 5, 12], [0, 12, 20]))
    out, lse = flash_attn_ext.attention_varlen(
        query, key, key, cu_q, cu_k, 7, 12, causal=causal, scale=0.5, softcap=3.0, return_lse=True
    )
    expected, expected_lse = reference.attention_varlen(
        query, key, key, [0, 5, 12], [0, 12, 20], right=0 if causal else None, bottom_right=causal != "top_left",
        scale=0.5, softcap=3.0,
    )  # fmt: skip
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("bad", ["int64", "two-dimensional", "float", "empty", "counts differ"])
def test_wrong_lengths_are_refused(bad: str, device: str):
    """V7: dtype and shape of cu_seqlens."""
    query = torch.randn(8, 2, 8, device=device)
    good = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
    wrong = {
        "int64": good.long(),
        "two-dimensional": good[None],
        "float": good.float(),
        "empty": good[:0],
        "counts differ": good[:2],
    }[bad]
    with pytest.raises(RuntimeError, match="cu_seqlens"):
        varlen(query, query, query, wrong, good, 5, 5)
    with pytest.raises(RuntimeError, match="cu_seqlens"):
        varlen(query, query, query, good, wrong, 5, 5)


@pytest.mark.parametrize(
    "content", [[0, 9, 4, 8], [3, 5, 6, 8], [0, 100, 200, 300], [-5, 2, 4, 8], [0, 2, 2, 1 << 30]], ids=str
)
def test_bad_lengths_stay_inside(content: list[int], device: str):
    """V7: contents are never read by the host; decreasing or too large ones may give anything, but not from outside."""
    buffer = torch.full((24, 2, 8), math.nan, device=device)
    buffer[8:16] = torch.randn(8, 2, 8, device=device)
    query = buffer[8:16].detach().requires_grad_()
    cu = torch.tensor(content, dtype=torch.int32, device=device)
    out, _ = varlen(query, query, query, cu, cu, 8, 8)
    out.sum().backward()
    assert out.isfinite().all() and query.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_rows_of_no_sequence(dtype: torch.dtype, device: str):
    """Before, behind and beyond the longest length: gradients are 0 there, and everywhere else something."""
    used = torch.zeros(400, dtype=torch.bool)
    used[5:40] = used[90:190] = True
    cu = torch.tensor([5, 40, 40, 90, 320], dtype=torch.int32, device=device)  # the last one of 230 rows is cut off at 100
    used[40:90] = True
    query, key, value, grad = (torch.randn(400, 2, 64, device=device, dtype=dtype) for _ in range(4))
    for deterministic in (False, True):
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        with poisoned(device):
            out, _ = varlen(*leaves, cu, cu, 100, 100, deterministic=deterministic)
            gradients = torch.autograd.grad(out, leaves, grad)
        for tensor in (out.detach(), *gradients):
            assert torch.equal((tensor != 0).any(-1).all(-1).cpu(), used)


@pytest.mark.parametrize("start", [127, 128, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_first_sequence_starts_behind_many_rows(dtype: torch.dtype, start: int, device: str):
    """More rows than a tile before the first sequence: nothing comes from them, and they get nothing."""
    cu = torch.tensor([0, 190, 190, 400], dtype=torch.int32, device=device)
    inputs = [torch.randn(start + 400, 2, 64, device=device, dtype=dtype) for _ in range(4)]
    for x in inputs:
        x[:start] = math.nan

    def run(first: int, at: torch.Tensor, deterministic: bool) -> dict[str, torch.Tensor]:
        *leaves, grad = (x[first:].clone().requires_grad_() for x in inputs)
        with poisoned(device):
            out, lse = varlen(*leaves, at, at, 400, 400, deterministic=deterministic)
            gradients = torch.autograd.grad(out, leaves, grad)
        return dict(zip(("lse", "out", "dquery", "dkey", "dvalue"), (lse.detach().t(), out.detach(), *gradients), strict=True))

    for deterministic in (False, True):
        alone, behind = run(start, cu, deterministic), run(0, cu + start, deterministic)
        for name, tensor in behind.items():
            torch.testing.assert_close(tensor[start:], alone[name], rtol=2e-2, atol=1e-2)
            assert (tensor[:start] == (-math.inf if name == "lse" else 0)).all(), name


def test_max_seqlen_as_a_tensor(device: str):
    """V6: torch reads a 0-d integer tensor as the number it holds (on a GPU that waits for it: pass an int there)."""
    query = torch.randn(8, 2, 8, device=device)
    cu = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
    longest = (cu[1:] - cu[:-1]).max()
    out, _ = varlen(query, query, query, cu, cu, longest, longest)
    assert torch.equal(out, varlen(query, query, query, cu, cu, 5, 5)[0])


def test_only_the_wanted_gradients(device: str):
    call = Call(Packed("wanted", (20, 33), (17, 50), sinks=True), torch.float32, device)
    everything = call.run(call.flash, torch.float32, True)
    tensors = [call.leaves[name] for name in ("query", "key", "value")]
    for place in range(4):
        wanted = [index == place for index in range(4)]
        gradients = torch.ops.flash.attention_varlen_backward(
            call.grad_out, call.grad_lse, *tensors, everything["out"], everything["lse"], *call.lengths(), *call.longest,
            None, call.leaves["sinks"], None, wanted, **call.case.options,
        )  # fmt: skip
        assert [gradient is not None for gradient in gradients] == wanted
        name = ("dquery", "dkey", "dvalue", "dsinks")[place]
        torch.testing.assert_close(gradients[place], everything[name], rtol=1e-6, atol=1e-6)


def test_gradcheck(device: str):
    call = Call(Packed("small", (3, 0, 4), (2, 3, 5), heads=2, kv_heads=1, head_dim=3, sinks=True), torch.float64, device)
    leaves = [tensor.requires_grad_() for tensor in call.leaves.values()]

    def function(*tensors):
        out, lse = call.flash(dict(zip(call.leaves, tensors, strict=True)))
        return out, lse.clamp(min=-100.0)

    assert torch.autograd.gradcheck(function, leaves)


def test_second_derivative_is_refused(device: str):
    """F1: no silent zeros; the error says what to do instead."""
    call = Call(Packed("small", (3, 4)), torch.float64, device)
    leaves = {name: tensor.requires_grad_() for name, tensor in call.leaves.items()}
    (first,) = torch.autograd.grad(call.flash(leaves)[0].pow(2).sum(), leaves["query"], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative: use"):
        first.sum().backward()


@pytest.mark.parametrize("shape", ["no rows", "no keys", "no sequences"])
def test_empty(shape: str, device: str):
    rows, keys = (0 if shape == "no rows" else 6), (0 if shape == "no keys" else 6)
    counts = 0 if shape == "no sequences" else 2
    query, key = (torch.randn(n, 2, 8, device=device, requires_grad=True) for n in (rows, keys))
    cu_q, cu_k = (torch.tensor([0, n // 2, n][: counts + 1], dtype=torch.int32, device=device) for n in (rows, keys))
    with poisoned(device):
        out, lse = varlen(query, key, key, cu_q, cu_k, rows, keys)
        out.sum().backward()
    if shape in ("no keys", "no sequences"):
        assert not out.any() and (lse == -math.inf).all()
        assert not query.grad.any()
    assert out.shape == (rows, 2, 8) and lse.shape == (2, rows)
