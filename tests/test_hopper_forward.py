"""The Hopper forward where its warpgroups part: tiles of which some see less than others, or nothing, and more tiles than blocks."""

from __future__ import annotations

import itertools

import pytest
import torch

import flash_attn_ext
from cases import Case, Inputs, make_inputs
from compare import check, run_flash

pytestmark = pytest.mark.cuda


@pytest.fixture
def hopper(cuda: str, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Forces the Hopper kernels; skips where the GPU or the build lacks them."""
    query = torch.empty(1, 1, 128, 64, device=cuda, dtype=torch.bfloat16)
    if "backward pass runs the sm90 kernels" not in flash_attn_ext.explain(query, query, query):
        pytest.skip("needs compute capability 9.0 and a build for it")
    monkeypatch.setenv("FLASH_ATTN_EXT_KERNEL", "sm90")
    return monkeypatch


def beside_sm80(case: Case, inputs: Inputs, hopper: pytest.MonkeyPatch) -> None:
    """Both families agree within the rounding of the type; each was compared with the reference on smaller shapes."""
    ours = run_flash(case, inputs, gradients=False)
    hopper.setenv("FLASH_ATTN_EXT_KERNEL", "sm80")
    general = run_flash(case, inputs, gradients=False)
    hopper.setenv("FLASH_ATTN_EXT_KERNEL", "sm90")
    assert (ours["out"].float() - general["out"].float()).abs().max() <= 2**-6 * general["out"].float().abs().max()
    # -inf where a row sees nothing, in both
    assert torch.allclose(ours["lse"], general["lse"], rtol=1e-5, atol=1e-4)


WINDOWS = [(None, None), (None, 0), (100, 0), (64, 64), (5, 0), (700, 200), (-3, 80)]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rows", [65, 130, 257, 321, 513])
def test_many_tiles(head_dim: int, rows: int, hopper: pytest.MonkeyPatch):
    """Several tiles a block, the last of them ragged: state that lives from tile to tile, and rings that warpgroups move unevenly."""
    for (left, right), keys in itertools.product(WINDOWS, (rows, 449)):
        for bottom_right in (False, True) if keys != rows else (False,):
            case = Case("", batch=40, heads=12, kv_heads=6, rows=rows, keys=keys, head_dim=head_dim, left=left, right=right,
                        bottom_right=bottom_right)  # fmt: skip
            beside_sm80(case, make_inputs(case, torch.bfloat16, "cuda"), hopper)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tiles_that_are_done_again(head_dim: int, dtype: torch.dtype, hopper: pytest.MonkeyPatch):
    """Scores that grow towards the first keys, far beyond what the reference of the last block covers: every tile is done twice."""
    for left, right in WINDOWS:
        case = Case("", batch=8, heads=12, rows=700, head_dim=head_dim, left=left, right=right)
        inputs = make_inputs(case, dtype, "cuda")
        growth = torch.linspace(30, 1, inputs.key.size(2), device="cuda")[:, None]
        inputs.key = (inputs.key.float() * growth).to(dtype)
        beside_sm80(case, inputs, hopper)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_nan_with_softcap(head_dim: int, hopper: pytest.MonkeyPatch):
    """Scores of a row share a reciprocal: a NaN must still stay with the rows that see it."""
    case = Case("", batch=1, heads=2, rows=300, head_dim=head_dim, right=0, softcap=3.0)
    inputs = make_inputs(case, torch.bfloat16, "cuda")
    inputs.key[:, :, 200] = float("nan")
    inputs.query[:, :, 70] = float("nan")
    ours = run_flash(case, inputs, gradients=False)
    nan = ours["out"].isnan().all(-1)
    expected = torch.zeros_like(nan)
    expected[..., 200:] = True
    expected[..., 70] = True
    assert torch.equal(nan, expected) and torch.equal(ours["out"].isnan().any(-1), expected)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_softcap_far_from_zero(head_dim: int, hopper: pytest.MonkeyPatch):
    """Where tanh is 1 to the last bit, and where four of its factors would overflow."""
    for size in (0.01, 3.0, 100.0, 1e4):
        case = Case("", batch=1, heads=2, rows=200, head_dim=head_dim, softcap=2.0, left=90, right=0)
        inputs = make_inputs(case, torch.bfloat16, "cuda")
        inputs.query *= size
        check(case, inputs, gradients=False)
