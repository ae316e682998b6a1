"""benchmarks/train_gpt.py: both attentions learn, and learn the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent))  # benchmarks is not an installed package
pytest.importorskip("matplotlib")

from benchmarks import train_gpt

TINY = ("--layers", "2", "--width", "32", "--heads", "2", "--context", "48", "--batch", "4", "--characters", "100000")


def test_curves_agree_and_are_drawn(tmp_path: Path, device: str):
    results = train_gpt.main([*TINY, "--compare", "--steps", "12", "--device", device, "--out", str(tmp_path)])
    flash, sdpa = results["flash"].losses, results["sdpa"].losses
    assert len(flash) == 12
    assert max(abs(a - b) for a, b in zip(flash, sdpa, strict=True)) < 1e-4
    assert flash[-1] < flash[0] - 0.1
    assert (tmp_path / "loss.png").stat().st_size > 1000
    lines = (tmp_path / "loss.csv").read_text().splitlines()
    assert lines[0] == "step,flash,sdpa"
    assert [float(cell) for cell in lines[-1].split(",")] == [11, flash[-1], sdpa[-1]]


def test_same_seed_same_curve(tmp_path: Path):
    arguments = [*TINY, "--steps", "4", "--device", "cpu", "--dropout", "0.1", "--out", str(tmp_path)]
    first, second = (train_gpt.main(arguments)["flash"].losses for _ in range(2))
    assert first == second


def test_text_is_real_ascii():
    text = train_gpt.library_text(50_000)
    assert len(text) == 50_000
    assert int(text.max()) < train_gpt.VOCABULARY
    assert b"import" in bytes(text.tolist())


def test_presets_yield_to_single_flags():
    args = train_gpt.parse(["--preset", "350m", "--context", "64"])
    assert (args.layers, args.width, args.heads, args.context) == (24, 1024, 16, 64)
