"""python -m flash_attn_ext: the report, its exit status, and that a wrong kernel does not pass."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import reference
from flash_attn_ext import __main__ as main
from flash_attn_ext import _reference, _selfcheck


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "flash_attn_ext", *arguments], capture_output=True, text=True, cwd="/")


@pytest.mark.slow
def test_report_is_green_and_complete():
    result = run()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "All is well." in result.stdout
    for word in ("torch", "CPU", "fp32", "bf16", "fp16", "fp64", "SDPA", "peak MiB"):
        assert word in result.stdout
    assert re.search(r"\[[#.]+\] \d+/\d+", result.stderr)  # progress, apart from the report


def test_cmake_prefix_holds_the_package():
    result = run("--cmake")
    assert result.returncode == 0
    prefix = Path(result.stdout.strip())
    assert list(prefix.rglob("flash_attn_ext-config.cmake"))


@pytest.mark.parametrize("dtype", _selfcheck.DTYPES)
def test_checks_pass(dtype: torch.dtype, device: str):
    case = next(case for case in _selfcheck.CASES if case.mask == "float")
    checks = [*_selfcheck.check_case(case, dtype, device), *_selfcheck.check_packed(dtype, device)]
    assert [check for check in checks if not check.ok] == []
    quantities = {check.quantity for check in checks}
    assert quantities >= {"out", "lse", "dquery", "dkey", "dvalue", "dattn_mask", "out of masked rows", "dquery of masked rows"}


def test_a_wrong_result_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """The kernel's results are bent by a thousandth: the report says so, and so does the exit status."""
    run_exactly = _selfcheck._run

    def run_bent(function, *args, **options):
        bend = 1.001 if function is torch.ops.flash.attention_forward else 1.0
        return {name: result * bend for name, result in run_exactly(function, *args, **options).items()}

    monkeypatch.setattr(_selfcheck, "_run", run_bent)
    monkeypatch.setattr(main, "DTYPES", (torch.float32,))
    monkeypatch.setattr(main, "devices", lambda: ["cpu"])
    monkeypatch.setattr(main, "speed", lambda device, progress: iter(()))
    assert not main.report()
    printed = capsys.readouterr().out
    assert "WRONG" in printed
    assert "Something is wrong" in printed


def test_nan_is_an_error():
    assert not _selfcheck.Check("case", "out", float("nan"), 1.0).ok


@pytest.mark.parametrize("case", _selfcheck.CASES, ids=lambda case: case.name)
def test_reference_is_the_tests_reference(case: _selfcheck.Case):
    """Two oracles written apart agree."""
    inputs = _selfcheck._inputs(case, torch.float64, "cpu")
    options = dict(case.options)
    keep = None
    if options.get("dropout_p"):
        keep = torch.rand(_selfcheck.BATCH, _selfcheck.HEADS, case.rows, case.keys) < 0.7
    ours = _reference.attention(**inputs, keep=keep, **options)
    names = {"attn_mask": "mask", "window_left": "left", "window_right": "right"}
    theirs = reference.attention(**{names.get(k, k): v for k, v in {**inputs, **options}.items()}, keep=keep)
    torch.testing.assert_close(ours, theirs)
