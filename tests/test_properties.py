"""Random shapes, strides, masks and options (hypothesis), against the reference and against the operator's own laws."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cases import Case, Inputs, make_inputs
from compare import check, run_flash

# The same examples on every run; FLASH_TEST_EXAMPLES asks for more of them, drawn anew each time.
EXAMPLES = int(os.environ.get("FLASH_TEST_EXAMPLES", "0"))
settings.register_profile(
    "flash",
    max_examples=EXAMPLES or 60,
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("flash")

LENGTHS = st.one_of(st.integers(1, 20), st.sampled_from([31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 150]))
HEAD_DIMS = st.one_of(st.integers(1, 40), st.sampled_from([48, 63, 64, 65, 80, 96, 100, 128]))
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads = draw(st.integers(1, 3))
    ends = st.one_of(st.none(), st.integers(0, 5), st.integers(0, 200))
    sizes = st.tuples(*(st.sampled_from([letter, "1"]) for letter in "BHLS")).map("".join)
    mask = draw(st.one_of(st.just(""), st.tuples(st.sampled_from(["float", "same", "bool"]), sizes).map(":".join)))
    return Case(
        "drawn",
        batch=draw(st.integers(1, 3)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        rows=draw(LENGTHS),
        keys=draw(LENGTHS),
        head_dim=draw(HEAD_DIMS),
        value_dim=draw(st.one_of(st.none(), HEAD_DIMS)),
        left=draw(ends),
        right=draw(ends),
        bottom_right=draw(st.booleans()),
        scale=draw(st.sampled_from([None, None, 0.1, 1.0, -0.2, 0.0])),
        softcap=draw(st.sampled_from([0.0, 0.0, 2.0, 30.0])),
        alibi=draw(st.sampled_from(["", "", "H", "BH"])),
        sinks=draw(st.booleans()),
        mask=mask,
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.1, 0.6])),
    )


def strided(draw: st.DrawFn, x: torch.Tensor) -> torch.Tensor:
    """The same values in another place: any order of dimensions, gaps that hold NaN, an odd start."""
    order = draw(st.permutations(range(4)))
    steps = draw(st.tuples(*(st.integers(1, 2) for _ in range(4))))
    start = draw(st.integers(0, 3))
    size = [x.size(dim) * step for dim, step in zip(order, steps, strict=True)]
    count = 1
    for length in size:
        count *= length
    fill = False if x.dtype == torch.bool else float("nan")
    buffer = torch.full((start + count,), fill, dtype=x.dtype, device=x.device)[start:].view(size)
    view = buffer[tuple(slice(None, None, step) for step in steps)].permute([order.index(dim) for dim in range(4)])
    view.copy_(x)
    return view


@given(data=st.data())
def test_any_call(data, device: str):
    """Values and every gradient within the tolerance rule, whatever is asked for."""
    case, dtype = data.draw(cases()), data.draw(DTYPES)
    inputs = make_inputs(case, dtype, device, data.draw(st.integers(0, 3)))
    check(case, inputs, gradients=True, grad_lse=data.draw(st.booleans()))


def exactly(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@given(data=st.data())
def test_strides_do_not_matter(data, device: str):
    """Any views of the operands, the mask and grad_out give the bits that contiguous ones give."""
    case, dtype = data.draw(cases()), data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    inputs = make_inputs(case, dtype, device)
    expected = run_flash(case, inputs, gradients=False)
    moved = Inputs(**vars(inputs))
    for name in ("query", "key", "value", "mask"):
        tensor = getattr(inputs, name)
        if tensor is not None:
            setattr(moved, name, strided(data.draw, tensor))
    ours = run_flash(case, moved, gradients=False)
    # Alignment may choose another CUDA kernel, which rounds in another order; on the CPU nothing may change.
    same = torch.testing.assert_close if device != "cpu" else exactly
    same(ours["out"], expected["out"])
    same(ours["lse"], expected["lse"])
    grad_out = strided(data.draw, inputs.grad_out)
    results = [
        torch.ops.flash.attention_backward(
            grad, inputs.grad_lse, source.query, source.key, source.value, expected["out"], expected["lse"], source.mask,
            source.alibi_slopes, source.sinks, source.seed, [True, True, True, False, False], **case.options,
            deterministic=True,
        )
        for grad, source in ((inputs.grad_out, inputs), (grad_out, moved))
    ]  # fmt: skip
    for ours, theirs in zip(results[1][:3], results[0][:3], strict=True):
        same(ours, theirs)


@given(data=st.data())
def test_keys_may_come_in_any_order(data, device: str):
    """Without positions, permuting keys, values and mask columns together changes nothing but rounding."""
    case = data.draw(cases()).with_(left=None, right=None, alibi="", dropout_p=0.0)
    inputs = make_inputs(case, torch.float64, device)
    expected = run_flash(case, inputs, gradients=False)
    order = torch.randperm(inputs.key.size(2), device=device)
    inputs.key, inputs.value = inputs.key[:, :, order], inputs.value[:, :, order]
    if inputs.mask is not None and inputs.mask.size(3) > 1:
        inputs.mask = inputs.mask[..., order]
    ours = run_flash(case, inputs, gradients=False)
    torch.testing.assert_close(ours["out"], expected["out"], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(ours["lse"], expected["lse"], rtol=1e-11, atol=1e-11)


@given(data=st.data())
def test_a_row_is_an_average_of_values(data, device: str):
    """Without a sink and dropout every output lies between the smallest and the largest value of its column."""
    case = data.draw(cases()).with_(sinks=False, dropout_p=0.0)
    inputs = make_inputs(case, torch.float32, device)
    result = run_flash(case, inputs, gradients=False)
    groups = case.heads // case.kv_heads
    value = inputs.value.repeat_interleave(groups, 1)
    alive = result["lse"].isfinite()[..., None]
    low, high = value.amin(2, keepdim=True) - 1e-4, value.amax(2, keepdim=True) + 1e-4
    assert (((result["out"] >= low) & (result["out"] <= high)) | ~alive).all()
    assert not (result["out"] * ~alive).any()


@given(data=st.data())
def test_splitting_the_keys_and_merging(data, device: str):
    """Two calls over parts of the keys, merged, are one call."""
    case = data.draw(cases()).with_(left=None, right=None, alibi="", sinks=False, dropout_p=0.0, mask="")
    inputs = make_inputs(case, torch.float64, device)
    whole = run_flash(case, inputs, gradients=False)
    cut = data.draw(st.integers(0, inputs.key.size(2)))
    parts = []
    for part in (slice(0, cut), slice(cut, None)):
        piece = Inputs(**(vars(inputs) | {"key": inputs.key[:, :, part], "value": inputs.value[:, :, part]}))
        parts.append(run_flash(case, piece, gradients=False))
    out, lse = torch.ops.flash.merge(parts[0]["out"], parts[0]["lse"], parts[1]["out"], parts[1]["lse"])
    torch.testing.assert_close(out, whole["out"], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(lse, whole["lse"], rtol=1e-11, atol=1e-11)
