"""benchmarks/train_gpt.py: every attention learns, all learn the same, and what is measured is written."""

from __future__ import annotations

import csv
import math
import statistics
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent))  # benchmarks is not an installed package
pytest.importorskip("matplotlib")

from benchmarks import gpt, report, train_gpt

TINY = ("--layers", "2", "--width", "32", "--heads", "2", "--context", "48", "--batch", "4", "--characters", "100000")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_curves_agree_and_are_drawn(tmp_path: Path, device: str):
    results = train_gpt.main([*TINY, "--compare", "--steps", "12", "--device", device, "--out", str(tmp_path)])
    ours, sdpa = results["ours"].losses, results["sdpa"].losses
    assert len(ours) == 12
    assert max(abs(a - b) for a, b in zip(ours, sdpa, strict=True)) < 1e-4
    assert ours[-1] < ours[0] - 0.1
    assert (tmp_path / "loss.png").stat().st_size > 1000
    lines = (tmp_path / "loss.csv").read_text().splitlines()
    assert lines[0] == "step,ours,sdpa"
    assert [float(cell) for cell in lines[-1].split(",")] == [11, ours[-1], sdpa[-1]]


def test_speed_is_written_and_reported(tmp_path: Path, device: str, capsys: pytest.CaptureFixture):
    arguments = [*TINY, "--attention", "ours", "sdpa", "sdpa-flash", "--dtype", "bf16", "--steps", "8", "--device", device]
    results = train_gpt.main([*arguments, "--characters-per-token", "2", "--out", str(tmp_path)])
    rows = rows_of(tmp_path / "speed.csv")
    assert [row["rival"] for row in rows] == ["ours", "sdpa", "sdpa-flash"]
    for row in rows:
        result = results[row["rival"]]
        assert int(row["parameters"]) > 2 * 32 * gpt.CHARACTERS**2  # tokens of two characters
        assert int(row["steps"]) == len(result.seconds) == 4
        assert float(row["tokens_per_second"]) == pytest.approx(4 * 48 / statistics.median(result.seconds), rel=0.01)
        assert row["last_loss"] == f"{result.losses[-1]:.5f}"
        assert (float(row["peak_gib"]) * 2**30 > result.state_bytes > 12 * result.parameters) if device == "cuda" else True
    capsys.readouterr()
    assert report.main([str(tmp_path / "speed.csv"), "--pictures", str(tmp_path)]) == 0
    assert "| 2 x 32 | 48 | 4 | bf16 | False |" in capsys.readouterr().out
    assert (tmp_path / "gpt.png").stat().st_size > 1000


def test_same_seed_same_curve(tmp_path: Path):
    arguments = [*TINY, "--steps", "4", "--device", "cpu", "--dropout", "0.1", "--out", str(tmp_path)]
    first, second = (train_gpt.main(arguments)["ours"].losses for _ in range(2))
    assert first == second


def test_attention_is_causal_and_chosen():
    """A model computes what its name says: the same as the textbook's attention, and by no other function."""
    torch.manual_seed(0)
    block = gpt.Block(32, 2, 0.0, "ours")
    x = torch.randn(2, 10, 32)
    out = block(x)
    q, k, v = block.qkv(block.norm_attention(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    score = (q @ k.transpose(-1, -2) / math.sqrt(16)).masked_fill(torch.ones(10, 10).triu(1).bool(), -math.inf)
    after = x + block.project((score.softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, after + block.mlp(block.norm_mlp(after)))
    block.attention = "none"
    with pytest.raises(KeyError):
        block(x)


def test_compile_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """--compile from a fresh process's state: the curves stay what they are without it."""
    from torch._functorch import config

    monkeypatch.setattr(config, "enable_autograd_cache", True)
    compile_blocks = gpt.GPT.compile_blocks
    monkeypatch.setattr(gpt.GPT, "compile_blocks", lambda model: compile_blocks(model, backend="aot_eager"))
    arguments = [*TINY, "--attention", "ours", "sdpa", "--steps", "3", "--device", "cpu", "--out", str(tmp_path)]
    plain, compiled = train_gpt.main(arguments), train_gpt.main([*arguments, "--compile"])
    assert not config.enable_autograd_cache
    for name in ("ours", "sdpa"):
        assert compiled[name].losses == pytest.approx(plain[name].losses, abs=1e-5)


def test_compiled_training_under_autocast(device: str):
    """Compiled layers learn what uncompiled ones do, attentions keep graphs of their own, and layers share them."""
    from torch._dynamo.testing import CompileCounterWithBackend

    text = torch.randint(128, (2, 33), device=device)
    losses: dict[tuple[str, bool], list[float]] = {}
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    for name in ("ours", "sdpa"):
        for compiled in (False, True):
            torch.manual_seed(0)
            model = gpt.GPT(3, 32, 2, 32, 0.0, name, 128).to(device)
            if compiled:
                model.compile_blocks(backend=counter)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            for _ in range(4):
                with torch.autocast(device, torch.bfloat16):
                    loss = model(text)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.setdefault((name, compiled), []).append(float(loss.detach()))
    assert counter.frame_count == 2  # of 2 attentions x 3 layers
    assert losses["ours", False][-1] < losses["ours", False][0] - 0.1
    for curve in losses.values():
        assert curve == pytest.approx(losses["ours", False], rel=5e-3)


def test_spent_budget_keeps_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        train_gpt.main([*TINY, "--steps", "4", "--device", "cpu", "--budget", "-1", "--out", str(tmp_path)])
    assert "budget" in capsys.readouterr().err


def test_text_is_real_ascii():
    text = gpt.library_text(50_000)
    assert len(text) == 50_000
    assert int(text.max()) < gpt.CHARACTERS
    assert b"import" in bytes(text.tolist())
    pairs = gpt.tokens_of(text[:5], 2)
    assert pairs.tolist() == [int(text[0]) + 128 * int(text[1]), int(text[2]) + 128 * int(text[3])]


def test_presets_yield_to_single_flags():
    args = train_gpt.parse(["--preset", "350m", "--context", "64"])
    assert (args.layers, args.width, args.heads, args.context) == (24, 1024, 16, 64)
