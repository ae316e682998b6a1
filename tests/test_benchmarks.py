"""benchmarks/: every suite runs on the CPU at tiny sizes, its CSV is read by the report, and the table of ncu is understood."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent))  # benchmarks is not an installed package

from benchmarks import __main__ as cli
from benchmarks import report, timing
from benchmarks.suites import traffic

SUITES = {
    "train": "--dtypes fp32 --head-dims 16 --lengths 32 --tokens 64 --width 32 --gemm 64 --float-masks none rows --mask-grad",
    "decode": "--dtypes fp32 --shrink 2048",
    "host": "--dtype fp32 --calls 3",
    "memory": "--dtypes fp32 --heads 2 --head-dim 16 --lengths 64 128",
    "errors": "--dtypes fp32 bf16 --head-dims 16 --lengths 40",
    "long": "--dtype fp32 --length 1500 --heads 4 --kv-heads 2 --head-dim 16",
}


@pytest.mark.parametrize("suite", list(SUITES))
def test_suite_and_report(suite: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"{suite}.csv"
    common = ["--device", "cpu", "--rounds", "3", "--budget", "60", "--rivals", "ours", "sdpa", "standard", "xformers"]
    assert cli.main([suite, *common, *SUITES[suite].split(), "--out", str(path)]) == 0
    assert "left out: xformers" in capsys.readouterr().err
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["rival"] for row in rows} >= {"ours", "sdpa", "standard"}
    assert all(row["suite"] == suite and row["torch"] and row["device"] and row["date"] for row in rows)
    refused = [row for row in rows if row["refused"]]
    assert all(row["rival"] == "sdpa" and row["causal"] == "True" and row["float_mask"] == "rows" for row in refused)
    assert report.main([str(path), "--pictures", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"## {suite}" in printed
    assert "| ours |" in printed
    assert suite not in ("train", "memory") or list(tmp_path.glob("*.png"))


def test_features_beside_dense(tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "features.csv"
    sizes = ["--head-dims", "256", "--lengths", "32", "--tokens", "64", "--rounds", "3"]
    assert cli.main(["features", "--device", "cpu", *sizes, "--budget", "60", "--out", str(path)]) == 0
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 7 and all(float(row["tflops"]) > 0 and float(row["of_dense"]) > 0 for row in rows)
    capsys.readouterr()
    assert report.main([str(path)]) == 0
    assert "| dense |" in capsys.readouterr().out


def test_rounds_are_interleaved_and_turn_around():
    order: list[str] = []
    calls = {name: timing.Call(lambda name=name: order.append(name)) for name in "abc"}

    def stopwatch(call: timing.Call) -> float:
        call.function()
        return float(len(order))

    timing.interleaved(calls, stopwatch, rounds=2, seconds=60, warmup=1)
    assert "".join(order) == "abc" + "abc" + "cba"
    assert calls["a"].seconds == [4.0, 9.0]


def test_a_refusal_stops_nobody_else():
    def refuse() -> None:
        raise RuntimeError("no kernel\nand more")

    calls = {"bad": timing.Call(refuse), "good": timing.Call(lambda: None)}
    timing.interleaved(calls, timing.Stopwatch("cpu"), rounds=3, seconds=60)
    assert calls["bad"].refused == "RuntimeError: no kernel"
    assert calls["bad"].median is None
    assert len(calls["good"].seconds) == 3


def test_spent_budget_stops_the_suite(tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "host.csv"
    assert cli.main(["host", "--device", "cpu", "--budget", "0", "--rivals", "sdpa", "--out", str(path)]) == 0
    assert "budget spent, not measured: forward" in capsys.readouterr().err
    assert not path.exists()


NCU = """==PROF== Connected to process 1234
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"0","1234","python","127.0.0.1","at::cuda::<unnamed>::spin_kernel(long)","1","7","(1, 1, 1)","(1, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","byte","64"
"0","1234","python","127.0.0.1","at::cuda::<unnamed>::spin_kernel(long)","1","7","(1, 1, 1)","(1, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_write.sum","byte","0"
"1","1234","python","127.0.0.1","gemm","1","7","(1, 1, 1)","(1, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","byte","1,000,000"
"1","1234","python","127.0.0.1","gemm","1","7","(1, 1, 1)","(1, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_write.sum","byte","500"
"2","1234","python","127.0.0.1","softmax","1","7","(1, 1, 1)","(1, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","byte","234"
"2","1234","python","127.0.0.1","softmax","1","7","(1, 1, 1)","(1, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_write.sum","byte","6"
"3","1234","python","127.0.0.1","at::cuda::<unnamed>::spin_kernel(long)","1","7","(1, 1, 1)","(1, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","byte","64"
"3","1234","python","127.0.0.1","at::cuda::<unnamed>::spin_kernel(long)","1","7","(1, 1, 1)","(1, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_write.sum","byte","0"
"4","1234","python","127.0.0.1","forward","1","7","(1, 1, 1)","(1, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","byte","77"
"4","1234","python","127.0.0.1","forward","1","7","(1, 1, 1)","(1, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_write.sum","byte","8"
"""


def test_unknown_rival_is_named(tmp_path: Path):
    path = tmp_path / "host.csv"
    with pytest.raises(SystemExit, match="nobody: unknown; known are ours,"):
        cli.main(["host", "--device", "cpu", "--rivals", "ours", "nobody", "--out", str(path)])
    assert not path.exists()


def test_ncu_table_is_cut_at_the_markers():
    read, write = traffic.METRICS
    assert traffic.parse(NCU) == [{read: 1000234.0, write: 506.0, "kernels": 2}, {read: 77.0, write: 8.0, "kernels": 1}]


def test_ncu_without_a_table_is_an_error():
    with pytest.raises(ValueError, match="ERR_NVGPUCTRPERM"):
        traffic.parse("==ERROR== ERR_NVGPUCTRPERM: no permission")
