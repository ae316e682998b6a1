"""The Hopper forward where its warpgroups part: tiles of which some see less than others, or nothing, and more tiles than blocks."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from cases import Case, make_inputs
from compare import check, poisoned, run_flash

pytestmark = pytest.mark.cuda

WINDOWS = [(None, None), (None, 0), (100, 0), (64, 64), (5, 0), (700, 200), (-3, 80)]


@pytest.fixture
def hopper(hopper_kernels: None, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Forces the Hopper kernels."""
    monkeypatch.setenv("FLASH_ATTN_EXT_KERNEL", "sm90")
    return monkeypatch


def assert_as_sm80(hopper: pytest.MonkeyPatch, inputs: tuple[Tensor, Tensor, Tensor], **options: object) -> None:
    """Both families agree within the rounding of the type. Each is compared with the reference elsewhere, on smaller shapes."""
    results = {}
    for family in ("sm80", "sm90"):
        hopper.setenv("FLASH_ATTN_EXT_KERNEL", family)
        with poisoned("cuda"):
            results[family] = torch.ops.flash.attention_forward(*inputs, **options)
    (out, lse), (true_out, true_lse) = results["sm90"], results["sm80"]
    difference = (out.float() - true_out.float()).abs().max()
    assert difference <= 2**-6 * true_out.float().abs().max(), f"{options}: out differs by {difference}"
    assert torch.allclose(lse, true_lse, rtol=1e-5, atol=1e-4), f"{options}: lse"  # -inf where a row sees nothing, in both


def normal(heads: int, length: int, head_dim: int, dtype: torch.dtype, batch: int) -> Tensor:
    """[batch, heads, length, head_dim], drawn on the GPU: there are too many numbers for make_inputs()."""
    return torch.randn(batch, length, heads, head_dim, device="cuda", dtype=dtype).transpose(1, 2)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rows", [65, 130, 257, 321, 513])
def test_many_tiles(head_dim: int, rows: int, hopper: pytest.MonkeyPatch):
    """Several tiles a block, the last of them ragged: state that lives from tile to tile, and rings that warpgroups move unevenly."""
    torch.manual_seed(0)
    query = normal(12, rows, head_dim, torch.bfloat16, batch=40)
    for keys in (rows, 449):
        key, value = (normal(6, keys, head_dim, torch.bfloat16, batch=40) for _ in range(2))
        for (left, right), bottom_right in itertools.product(WINDOWS, (False, True)):
            options = {"window_left": left, "window_right": right, "bottom_right": bottom_right}
            assert_as_sm80(hopper, (query, key, value), **options)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tiles_that_are_done_again(head_dim: int, dtype: torch.dtype, hopper: pytest.MonkeyPatch):
    """Scores that grow towards the first keys, far beyond what the reference of the last block covers."""
    torch.manual_seed(0)
    query, key, value = (normal(12, 700, head_dim, dtype, batch=8) for _ in range(3))
    key = (key.float() * torch.linspace(30, 1, 700, device="cuda")[:, None]).to(dtype)
    for left, right in WINDOWS:
        assert_as_sm80(hopper, (query, key, value), window_left=left, window_right=right)


# rows, keys, window, bottom_right: bands whose last is ragged, windows that end within blocks, keys before and behind the rows, wide ones.
STREAMS = [
    (4650, 4650, (512, 0), False),
    (4672, 4672, (511, 0), False),
    (4653, 5331, (500, 40), True),
    (4800, 4790, (600, 5), False),
    (9300, 9333, (1024, 0), True),
    (10000, 10000, (700, 300), False),
    (15500, 15500, (2000, 0), False),
]


def make_streamed(head_dim: int, dtype: torch.dtype, rows: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Enough heads that windows are streamed on 132 multiprocessors: all warpgroups have several tiles, in several heads."""
    torch.manual_seed(0)
    query = normal(12, rows, head_dim, dtype, batch=4)
    return query, normal(6, keys, head_dim, dtype, batch=4), normal(6, keys, head_dim, dtype, batch=4)


def is_streamed(inputs: tuple[Tensor, Tensor, Tensor], **options: object) -> bool:
    return "one stream of keys" in torch.ops.flash.explain(*inputs, **options)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows,keys,window,bottom_right", STREAMS)
def test_streams(
    head_dim: int,
    dtype: torch.dtype,
    rows: int,
    keys: int,
    window: tuple[int, int],
    bottom_right: bool,
    hopper: pytest.MonkeyPatch,
):
    """Long windows, in which each warpgroup has tiles of its own: against the other family, and the same bits each time."""
    inputs = make_streamed(head_dim, dtype, rows, keys)
    options = {"window_left": window[0], "window_right": window[1], "bottom_right": bottom_right}
    if torch.cuda.get_device_properties("cuda").multi_processor_count == 132:
        assert is_streamed(inputs, **options)
    for sinks in (None, torch.randn(12, device="cuda")):
        assert_as_sm80(hopper, inputs, sinks=sinks, **options)
    first = torch.ops.flash.attention_forward(*inputs, **options)
    for _ in range(30):
        for ours, expected in zip(torch.ops.flash.attention_forward(*inputs, **options), first, strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("largest", [4, 30])
def test_streams_that_are_done_again(head_dim: int, dtype: torch.dtype, largest: int, hopper: pytest.MonkeyPatch):
    """Some tiles, or nearly all, at the end of a stream: scores that grow towards the first keys of each stretch of 300."""
    query, key, value = make_streamed(head_dim, dtype, 4650, 4650)
    growth = largest - (largest - 1) * (torch.arange(4650, device="cuda") % 300) / 300
    key = (key.float() * growth[:, None]).to(dtype)
    assert_as_sm80(hopper, (query, key, value), window_left=512, window_right=0)
    assert_as_sm80(hopper, (query, key, value), window_left=600, window_right=30)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("largest", [1, 4, 30])
def test_a_thousand_runs(head_dim: int, dtype: torch.dtype, largest: int, hopper: pytest.MonkeyPatch):
    """Blocks claim tiles as they come, and which tiles are done again differs from tile to tile; the bits must not."""
    torch.manual_seed(0)
    query, key, value = (normal(12, 700, head_dim, dtype, batch=8) for _ in range(3))
    key = (key.float() * torch.linspace(largest, 1, 700, device="cuda")[:, None]).to(dtype)
    sinks = torch.randn(12, device="cuda")
    for left, right in ((None, None), (None, 0), (250, 0)):

        def run(left: int | None = left, right: int | None = right) -> tuple[Tensor, Tensor]:
            return torch.ops.flash.attention_forward(query, key, value, sinks=sinks, window_left=left, window_right=right)

        expected = run()
        for repetition in range(1000):
            for ours, first in zip(run(), expected, strict=True):
                assert torch.equal(ours, first), f"window {left}, {right}: run {repetition} differs"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_nan_with_softcap(head_dim: int, hopper: pytest.MonkeyPatch):
    """Scores of a row share a reciprocal: a NaN must still stay with the rows that see it."""
    case = Case("", batch=1, heads=2, rows=300, head_dim=head_dim, right=0, softcap=3.0)
    inputs = make_inputs(case, torch.bfloat16, "cuda")
    inputs.key[:, :, 200] = float("nan")
    inputs.query[:, :, 70] = float("nan")
    nan = run_flash(case, inputs, gradients=False)["out"].isnan()
    expected = torch.zeros(1, 2, 300, dtype=torch.bool, device="cuda")
    expected[..., 200:] = True
    expected[..., 70] = True
    assert torch.equal(nan.all(-1), expected) and torch.equal(nan.any(-1), expected)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_softcap_far_from_zero(head_dim: int, hopper: pytest.MonkeyPatch):
    """Where tanh is 1 to the last bit, and where four of its factors would overflow."""
    for size in (0.01, 3.0, 100.0, 1e4):
        case = Case("", batch=1, heads=2, rows=200, head_dim=head_dim, softcap=2.0, left=90, right=0)
        inputs = make_inputs(case, torch.bfloat16, "cuda")
        inputs.query = inputs.query * size
        check(case, inputs, gradients=False)
