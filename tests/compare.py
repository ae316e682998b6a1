"""Runs a case through the library and through the reference, and compares: the tolerance rule of the whole suite.

Rule: error <= factor * (error of plain attention in the same dtype) + a tiny absolute term; factor 2 forward, 3 gradients.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import reference
from cases import Case, Inputs

FORWARD, GRADIENT = 2.0, 3.0
# Absolute terms, per unit of the largest true value: a few roundings of the accumulate type.
TINY = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 1e-5, torch.bfloat16: 1e-5}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FEW = 16  # numbers of which plain attention's error may be small by chance
GRADIENTS = ("query", "key", "value", "mask", "sinks")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def accumulate_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextlib.contextmanager
def poisoned(device: str) -> Iterator[None]:
    """Fresh memory holds NaN: what a kernel leaves unwritten, or reads without having written, shows."""
    if torch.device(device).type == "cuda":
        # The caching allocator hands the freed blocks out again: large ones are cut up, small ones come from 2 MiB segments.
        held = [torch.full((1 << 26,), math.nan, device=device)]
        held += [torch.full((size,), math.nan, device=device) for size in (64, 512, 4096, 32768, 131072) for _ in range(24)]
        del held
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # makes torch.empty fill with NaN, also from C++
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def tensors_of(inputs: Inputs) -> dict[str, Tensor]:
    """The differentiable inputs that are there, as fresh leaves."""
    found = {
        "query": inputs.query,
        "key": inputs.key,
        "value": inputs.value,
        "mask": inputs.mask if inputs.mask is not None and inputs.mask.is_floating_point() else None,
        "sinks": inputs.sinks,
    }
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def differentiate(
    function: Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]],
    leaves: dict[str, Tensor],
    grad_out: Tensor,
    grad_lse: Tensor | None,
) -> dict[str, Tensor]:
    """out, lse, and d<name> for every leaf."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in leaves.items()}
    out, lse = function(leaves)
    outputs, incoming = [out], [grad_out.to(out.dtype)]
    if grad_lse is not None:
        outputs.append(lse)
        incoming.append(grad_lse.to(lse.dtype))
    gradients = torch.autograd.grad(outputs, list(leaves.values()), incoming, allow_unused=True)
    result = {"out": out.detach(), "lse": lse.detach()}
    for name, gradient in zip(leaves, gradients, strict=True):
        result["d" + name] = torch.zeros_like(leaves[name]) if gradient is None else gradient
    return result


def is_refused(case: Case, inputs: Inputs) -> bool:
    """The CUDA kernels take head dims up to 512, and say so where a case has more."""
    if inputs.query.device.type == "cpu" or max(case.head_dim, case.value_dim or 0) <= 512:
        return False
    with pytest.raises(RuntimeError, match="the CUDA kernels take at most 512"):
        run_flash(case, inputs, gradients=False)
    return True


def flash_call(case: Case, inputs: Inputs, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.ops.flash.attention_forward(
        leaves["query"],
        leaves["key"],
        leaves["value"],
        leaves.get("mask", inputs.mask),
        inputs.alibi_slopes,
        leaves.get("sinks"),
        inputs.seed,
        **case.options,
    )


def reference_call(case: Case, inputs: Inputs, leaves: dict[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    keep = None
    if inputs.seed is not None:
        size = (*inputs.query.shape[:3], inputs.key.size(2))
        keep = torch.ops.flash.dropout_mask(inputs.seed, size, case.dropout_p)
    return reference.attention(
        leaves["query"],
        leaves["key"],
        leaves["value"],
        mask=leaves.get("mask", inputs.mask),
        left=case.left,
        right=case.right,
        bottom_right=case.bottom_right,
        scale=case.scale,
        softcap=case.softcap,
        alibi_slopes=None if inputs.alibi_slopes is None else inputs.alibi_slopes.to(dtype),
        sinks=leaves.get("sinks"),
        keep=keep,
        dropout_p=case.dropout_p,
    )


def run_flash(case: Case, inputs: Inputs, *, gradients: bool, grad_lse: bool = False) -> dict[str, Tensor]:
    with poisoned(str(inputs.query.device)):
        if not gradients:
            with torch.no_grad():
                out, lse = flash_call(case, inputs, tensors_of(inputs))
            return {"out": out, "lse": lse}
        return differentiate(
            lambda leaves: flash_call(case, inputs, leaves),
            tensors_of(inputs),
            inputs.grad_out,
            inputs.grad_lse if grad_lse else None,
        )


def run_reference(
    case: Case, inputs: Inputs, dtype: torch.dtype, *, gradients: bool, grad_lse: bool = False
) -> dict[str, Tensor]:
    leaves = {name: tensor.to(dtype) for name, tensor in tensors_of(inputs).items()}
    if not gradients:
        with torch.no_grad():
            out, lse = reference_call(case, inputs, leaves, dtype)
        return {"out": out, "lse": lse}
    return differentiate(
        lambda leaves: reference_call(case, inputs, leaves, dtype),
        leaves,
        inputs.grad_out,
        inputs.grad_lse if grad_lse else None,
    )


def assert_within(
    name: str,
    ours: Tensor,
    truth: Tensor,
    plain: Tensor,
    factor: float,
    dtype: torch.dtype,
    size: float | None = None,
    slack: float = 0.0,
) -> None:
    """The tolerance rule. NaN and infinities must stand where the truth has them. size: instead of the largest true value.
    slack: error that the method itself brings (delta_error)."""
    assert ours.shape == truth.shape, f"{name}: shape {tuple(ours.shape)}, expected {tuple(truth.shape)}"
    ours, truth, plain = ours.double(), truth.double(), plain.double()
    finite = truth.isfinite()
    special = ours[~finite]
    assert torch.equal(special.nan_to_num(nan=12345.0), truth[~finite].nan_to_num(nan=12345.0)), (
        f"{name}: NaN or infinity missing in {int((special.nan_to_num(1e3) != truth[~finite].nan_to_num(1e3)).sum())} places"
    )
    ours, truth, plain = ours[finite], truth[finite], plain[finite]
    if truth.numel() == 0:
        return
    wrong = ~ours.isfinite()
    assert not wrong.any(), f"{name}: {int(wrong.sum())} of {ours.numel()} values are not finite"
    error = (ours - truth).abs().max().item()
    plain_error = (plain - truth).abs().max().item()
    allowed = slack + factor * plain_error + TINY[dtype] * (1.0 + (truth.abs().max().item() if size is None else size))
    assert error <= allowed, f"{name}: error {error:.3e} > allowed {allowed:.3e} (plain attention: {plain_error:.3e})"


def assert_same(ours: Tensor, expected: Tensor, what: object = "") -> None:
    """The same call in other clothes: bit by bit on the CPU, within a few roundings on a GPU, where alignment chooses kernels."""
    assert ours.shape == expected.shape and ours.dtype == expected.dtype, what
    if ours.device.type == "cpu":
        assert torch.equal(ours, expected), f"{what}: {int((ours != expected).sum())} of {ours.numel()} values differ"
        return
    few = (16 if ours.dtype.itemsize >= 4 else 4) * torch.finfo(ours.dtype).eps
    largest = expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 0.0
    torch.testing.assert_close(ours, expected, rtol=few, atol=few * largest, msg=lambda text: f"{what}: {text}")


def delta_error(truth: dict[str, Tensor], grad_out: Tensor, dtype: torch.dtype) -> Tensor:
    """[batch, heads, rows]: how far backward's delta = rowsum(dO * O) lies off, since it sees O rounded to its dtype, where plain
    attention has the probabilities. It shifts all dS of a row together, so it shows where they nearly cancel. The roundings of a row
    are independent, each of up to eps / 2 and of eps / 2 / sqrt(3) in the mean: three times this is five deviations."""
    return (grad_out.double() * truth["out"].double()).pow(2).sum(-1).sqrt() * (torch.finfo(dtype).eps / 2)


def method_errors(case: Case, inputs: Inputs, truth: dict[str, Tensor], dtype: torch.dtype) -> dict[str, float]:
    """What delta_error does to gradients where plain attention has no error of its own to measure it by."""
    rows, errors = delta_error(truth, inputs.grad_out, dtype), {}

    def largest(x: Tensor) -> float:
        return x.abs().max().item() if x.numel() else 0.0

    def walk(dims: list[int]) -> float:  # independent from row to row: they add up as a random walk
        return 3 * largest(rows.pow(2).sum(dims).sqrt() if dims else rows)

    # Under dropout a row that sees one key has O = V / (1 - p), which is rounded, and plain attention's dS is exactly 0.
    if case.dropout_p > 0:
        scale = abs(case.scale) if case.scale is not None else case.head_dim**-0.5
        group = inputs.query.size(1) / max(1, inputs.key.size(1))
        errors["dquery"] = walk([]) * scale * largest(inputs.key)
        errors["dkey"] = walk([2]) * math.sqrt(group) * scale * largest(inputs.query)
        errors["dsinks"] = walk([0, 2])
    if "dmask" in truth and inputs.mask is not None and (case.dropout_p > 0 or inputs.mask.size(2) == 1):
        errors["dmask"] = walk([dim for dim in range(3) if inputs.mask.size(dim) == 1])
    return errors


def compare(
    ours: dict[str, Tensor],
    truth: dict[str, Tensor],
    plain: dict[str, Tensor],
    single: Tensor,
    dtype: torch.dtype,
    slack: dict[str, float] | None = None,
) -> None:
    """`single` is plain attention's lse in the accumulate type: lse is never returned in a narrow type."""
    problems = []
    # dQ, dK and the rest are sums of P * (dP - delta): rounding has the size of the terms, also where they cancel to nothing.
    # So the absolute term is per unit of the largest gradient of the call.
    largest = max((truth[name].abs().max().item() for name in truth if name[0] == "d" and truth[name].numel()), default=0.0)
    # Backward makes P again from lse, which keeps a number of the size of the scores to the epsilon of the accumulate type.
    alive = truth["lse"][truth["lse"].isfinite()] if "lse" in truth else single
    lost = torch.finfo(accumulate_type(dtype)).eps * (alive.abs().max().item() if alive.numel() else 0.0) * largest
    # For few numbers plain attention's error in the worst gradient of the call counts.
    operands = [name for name in truth if name in ("dquery", "dkey", "dvalue")]
    errors = [(plain[name].double() - truth[name].double()).nan_to_num(0.0, 0.0, 0.0).abs() for name in operands]
    worst = max((error.max().item() for error in errors if error.numel()), default=0.0)
    for name in ours:
        try:
            if name == "lse":
                assert_within(name, ours[name], truth[name], single, FORWARD, accumulate_type(dtype))
            else:
                factor, size = (FORWARD, None) if name == "out" else (GRADIENT, largest)
                if name == "dmask":  # of a broadcast mask: adds up the roundings of many rows, which cancel in the truth
                    size = largest * math.sqrt(truth["lse"].numel() / max(1, math.prod(truth[name].shape[:3])))
                extra = (slack or {}).get(name, 0.0) + (0.0 if name == "out" else lost)
                if name != "out" and truth[name].numel() < FEW:
                    extra += GRADIENT * worst
                assert_within(name, ours[name], truth[name], plain[name], factor, dtype, size, extra)
        except AssertionError as problem:
            problems.append(str(problem))
    assert not problems, "\n".join(problems)


def check(case: Case, inputs: Inputs, *, gradients: bool, grad_lse: bool = False) -> dict[str, Tensor]:
    """Runs the case in the inputs' dtype and applies the rule to every output. Returns what the library gave."""
    dtype = inputs.query.dtype
    ours = run_flash(case, inputs, gradients=gradients, grad_lse=grad_lse)
    truth = run_reference(case, inputs, torch.float64, gradients=gradients, grad_lse=grad_lse)
    plain = run_reference(case, inputs, dtype, gradients=gradients, grad_lse=grad_lse)
    single = run_reference(case, inputs, accumulate_type(dtype), gradients=False)["lse"]
    slack = method_errors(case, inputs, truth, dtype) if gradients else {}
    compare(ours, truth, plain, single, dtype, slack)
    return ours
