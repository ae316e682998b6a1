"""The self-check's measurements: errors of out and every gradient against fp64 over a small grid, then time and memory.

An error passes if it is at most twice (forward) or three times (gradients) that of standard attention in the same dtype,
plus one rounding of a number of the result's size. fp64 is its own reference: a hundred roundings. Random normal inputs.
"""

import ctypes
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _reference
from .functional import attention, attention_varlen

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Case(NamedTuple):
    name: str
    rows: int = 129
    keys: int = 129
    head_dim: int = 64
    value_dim: int = 64
    kv_heads: int = 4
    options: Mapping[str, Any] = MappingProxyType({})
    mask: str = ""  # "float", "bool"
    extras: bool = False  # ALiBi slopes and sinks


HEADS, BATCH = 4, 2
CASES = (
    Case("plain"),
    Case("causal", rows=150, keys=97, options={"window_right": 0}),
    Case("causal bottom-right, GQA", rows=70, keys=161, kv_heads=2, options={"window_right": 0, "bottom_right": True}),
    Case("window, MQA, E 40, Ev 24", head_dim=40, value_dim=24, kv_heads=1, options={"window_left": 30, "window_right": 5}),
    Case("float mask, masked rows", rows=65, keys=130, head_dim=128, value_dim=128, mask="float"),
    Case("bool mask, masked rows", rows=33, keys=200, mask="bool"),
    Case("dropout", rows=100, keys=140, options={"dropout_p": 0.3}),
    Case("softcap, ALiBi, sinks", options={"softcap": 4.0, "window_right": 0}, extras=True),
    Case("E 256", rows=40, keys=72, head_dim=256, value_dim=256),
)


class Check(NamedTuple):
    case: str
    quantity: str
    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed  # False for NaN


def _inputs(case: Case, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    inputs = {
        "query": normal(BATCH, HEADS, case.rows, case.head_dim),
        "key": normal(BATCH, case.kv_heads, case.keys, case.head_dim),
        "value": normal(BATCH, case.kv_heads, case.keys, case.value_dim),
    }
    if case.mask == "float":
        inputs["attn_mask"] = normal(1, HEADS, case.rows, case.keys)
        inputs["attn_mask"][:, :, 3::7] = -torch.inf
    elif case.mask == "bool":
        inputs["attn_mask"] = torch.rand(BATCH, 1, case.rows, case.keys, generator=generator).to(device) < 0.5
        inputs["attn_mask"][:, :, 2::5] = False
    if case.extras:
        accumulate = torch.float64 if dtype == torch.float64 else torch.float32
        inputs["alibi_slopes"] = 2.0 ** -torch.arange(1, HEADS + 1, device=device, dtype=accumulate)
        inputs["sinks"] = normal(HEADS).to(accumulate)
    return inputs


def _run(
    function: Callable[..., tuple[Tensor, Tensor]], inputs: dict[str, Tensor], dtype: torch.dtype | None, **options: Any
) -> dict[str, Tensor]:
    """out, lse and the gradient of every floating input (slopes have none) of a fixed random sum over out and lse."""
    leaves = {
        name: (tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor).detach() for name, tensor in inputs.items()
    }
    wanted = [name for name, tensor in leaves.items() if tensor.is_floating_point() and name != "alibi_slopes"]
    for name in wanted:
        leaves[name].requires_grad_()
    out, lse = function(**leaves, **options)
    generator = torch.Generator().manual_seed(2)
    grad_out = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
    grad_lse = torch.randn(lse.shape, generator=generator, dtype=torch.float64).to(lse)
    gradients = torch.autograd.grad([out, lse], [leaves[name] for name in wanted], [grad_out, grad_lse])
    return {"out": out.detach(), "lse": lse.detach()} | {
        f"d{name}": gradient for name, gradient in zip(wanted, gradients, strict=True)
    }


def _compare(case: str, ours: dict[str, Tensor], same: dict[str, Tensor], truth: dict[str, Tensor]) -> Iterator[Check]:
    for quantity, exact in truth.items():
        finite = exact.isfinite()

        def distance(
            results: dict[str, Tensor], quantity: str = quantity, exact: Tensor = exact, finite: Tensor = finite
        ) -> float:
            found = results[quantity].to(torch.float64)
            if not bool((found[~finite] == exact[~finite]).all()):
                return torch.inf
            return float((found - exact)[finite].abs().max()) if bool(finite.any()) else 0.0

        size = float(exact[finite].abs().max()) if bool(finite.any()) else 0.0
        rounding = torch.finfo(ours[quantity].dtype).eps * size * (100 if ours["out"].dtype == torch.float64 else 1)
        factor = 3 if quantity.startswith("d") else 2
        yield Check(case, quantity, distance(ours), factor * distance(same) + rounding)


def check_case(case: Case, dtype: torch.dtype, device: str) -> Iterator[Check]:
    inputs = _inputs(case, dtype, device)
    options, reference_options = dict(case.options), dict(case.options)
    if dropout_p := case.options.get("dropout_p", 0.0):
        options["seed"] = torch.rand(2, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(device)
        size = [BATCH, HEADS, case.rows, case.keys]
        reference_options["keep"] = torch.ops.flash.dropout_mask(options["seed"], size, dropout_p)
    ours = _run(torch.ops.flash.attention_forward, inputs, None, **options)
    truth = _run(_reference.attention, inputs, torch.float64, **reference_options)
    yield from _compare(case.name, ours, _run(_reference.attention, inputs, dtype, **reference_options), truth)
    empty = truth["lse"] == -torch.inf
    for quantity in ("out", "dquery") if bool(empty.any()) else ():
        yield Check(case.name, f"{quantity} of masked rows", float(ours[quantity][empty].abs().max()), 0.0)


def check_packed(dtype: torch.dtype, device: str) -> Iterator[Check]:
    """Three packed sequences, one without rows and one without keys, against the dense operator on each."""
    rows, keys = (37, 0, 20), (50, 11, 0)
    case = Case("packed, causal", rows=sum(rows), keys=sum(keys))
    inputs = {name: tensor[0].transpose(0, 1) for name, tensor in _inputs(case, dtype, device).items()}

    def offsets(lengths: tuple[int, ...]) -> Tensor:
        return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)

    def packed(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return attention_varlen(
            query, key, value, offsets(rows), offsets(keys), max(rows), max(keys), causal=True, return_lse=True
        )

    def one_by_one(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        parts = [
            _reference.attention(*(t.transpose(0, 1)[None] for t in part), window_right=0, bottom_right=True)
            for part in zip(query.split(rows), key.split(keys), value.split(keys), strict=True)
        ]
        return torch.cat([out[0].transpose(0, 1) for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], -1)

    results = [_run(packed, inputs, None), _run(one_by_one, inputs, dtype), _run(one_by_one, inputs, torch.float64)]
    yield from _compare(case.name, *results)


class Speed(NamedTuple):
    forward: float  # seconds
    backward: float  # seconds


def peak_memory(device: str, call: Callable[[], object]) -> int | None:
    """Bytes that a call needs at its peak beyond what was there before, results included. None: this system cannot tell.

    On the CPU: the process's high-water mark, which Linux lets us reset, after glibc has given back what it kept for reuse.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - allocated

    def resident(field: str) -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

    try:
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as control:
            control.write("5")
        before = resident("VmRSS")
    except (OSError, AttributeError, StopIteration):
        return None
    call()
    return resident("VmHWM") - before


class Workload:
    """Causal attention of one shape, forward and backward, by whichever function."""

    def __init__(self, dtype: torch.dtype, device: str, shape: tuple[int, int, int, int]) -> None:
        self.device = device
        self.inputs = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
        self.gradient = torch.randn(shape, device=device, dtype=dtype)

    def _clock(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def once(self, function: Callable[..., Tensor]) -> Speed:
        begin = self._clock()
        out = function(*self.inputs)
        middle = self._clock()
        torch.autograd.grad(out, self.inputs, self.gradient)
        return Speed(middle - begin, self._clock() - middle)

    def speed(self, function: Callable[..., Tensor], repeats: int = 3) -> Speed:
        """The best of a few, after one to warm up."""
        self.once(function)
        times = [self.once(function) for _ in range(repeats)]
        return Speed(min(t.forward for t in times), min(t.backward for t in times))

    def memory(self, function: Callable[..., Tensor]) -> int | None:
        return peak_memory(self.device, lambda: self.once(function))


RIVALS: dict[str, Callable[..., Tensor]] = {
    "flash_attn_ext": lambda q, k, v: attention(q, k, v, causal=True),
    "SDPA": lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
    "standard": lambda q, k, v: _reference.attention(q, k, v, window_right=0)[0],
}
