"""explain: what a call would run and why, without running it."""

from __future__ import annotations

import pytest
import torch

import flash_attn_ext


def explain(device: str, *shapes, dtype: torch.dtype = torch.float32, **options) -> str:
    shapes = shapes or ((2, 4, 100, 64),) * 3
    return flash_attn_ext.explain(*(torch.empty(shape, device=device, dtype=dtype) for shape in shapes), **options)


def test_names_the_kernel(device: str):
    text = explain(device)
    assert text == explain(device), "explain must be a function of its arguments"
    assert ("cpu" if device == "cpu" else "sm") in text.lower()
    for word in ("tile", "split", "workspace"):
        assert word in text.lower(), f"{word!r} is not in: {text}"


def test_runs_nothing(device: str):
    """Inputs are never read: an explanation of a call that would take minutes comes at once, and NaN does not matter."""
    query = torch.empty(1, 1, 1, 64, device=device).expand(64, 64, 100_000, 64)
    assert flash_attn_ext.explain(query, query, query)
    storage = torch.full((2, 2, 8, 8), float("nan"), device=device, requires_grad=True)
    flash_attn_ext.explain(storage, storage, storage)
    assert storage.isnan().all()


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": "bottom_right", "window": (10, None)},
        {"softcap": 3.0},
        {"dropout_p": 0.1},
        {"attn_mask": torch.ones(100, 100, dtype=torch.bool)},
        {"scale": 0.3, "return_lse": True},
        {"deterministic": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_takes_what_attention_takes(options: dict, device: str):
    options = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    assert explain(device, **options)


def test_says_that_it_would_copy(device: str):
    """Architecture decision 9: a copy behind the user's back is explained."""
    dense = torch.empty(2, 4, 64, 64, device=device)
    for query in (dense.mT, torch.empty(2, 4, 64, 128, device=device)[..., ::2]):
        assert "cop" in flash_attn_ext.explain(query, dense, dense).lower()
    assert "cop" not in flash_attn_ext.explain(dense, dense, dense).lower()
    rows_first = torch.empty(2, 64, 4, 64, device=device).transpose(1, 2)
    assert "cop" not in flash_attn_ext.explain(rows_first, rows_first, rows_first).lower()


def test_raises_what_attention_raises(device: str):
    with pytest.raises(RuntimeError, match="key"):
        explain(device, (2, 4, 5, 8), (2, 4, 5, 9), (2, 4, 5, 9))
    with pytest.raises(ValueError, match="causal"):
        explain(device, causal="sideways")
    with pytest.raises(TypeError, match="colour"):
        explain(device, colour="red")


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 2, 3, 5, 8), (0, 3, 5, 8), (2, 3, 0, 8)], ids=str)
def test_every_rank_and_empty_ones(shape, device: str):
    assert explain(device, shape, shape, shape)


def test_unknown_kernel_family(device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLASH_ATTN_EXT_KERNEL", "sm12")
    with pytest.raises(RuntimeError, match="FLASH_ATTN_EXT_KERNEL.*sm80"):
        explain(device)


@pytest.mark.cuda
def test_forced_family(cuda: str, monkeypatch: pytest.MonkeyPatch):
    """FLASH_ATTN_EXT_KERNEL=sm80 is taken at its word, and the result stays within rounding of the free choice."""
    query = torch.randn(1, 2, 200, 64, device=cuda, dtype=torch.bfloat16)
    free = torch.ops.flash.attention(query, query, query)
    monkeypatch.setenv("FLASH_ATTN_EXT_KERNEL", "sm80")
    assert "sm80" in flash_attn_ext.explain(query, query, query)
    torch.testing.assert_close(torch.ops.flash.attention(query, query, query), free, rtol=2e-2, atol=2e-2)
