"""A small grid of calls that touches every kernel and feature, to be run under compute-sanitizer; checks no numbers.

    python tests/sanitize.py                              each tool in turn; exit status 1 on a finding
    python tests/sanitize.py --tools racecheck --seconds 120 --shards 16
    python tests/sanitize.py --only decode                calls with this in their name
    python tests/sanitize.py --inside --seconds 60        the calls alone, as a tool runs them

Most of the time goes into the tool's own work on the host, so the calls are dealt to several processes side by side on one GPU. Wide
coverage comes first: a run cut off by --seconds has seen every instance once. Torch's caching allocator is off inside: each tensor
is an allocation of its own, so a read past its end is a finding, and nothing old makes memory look initialised.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
FINDING = 86  # exit status of compute-sanitizer when it found something
# Our kernels alone, except in initcheck: it has to see torch's kernels write what ours read.
OURS = ("--kernel-name", "kns=N5flash")


def dense_cases() -> Iterator[tuple]:
    """(case, dtype, deterministic, layout), the widest coverage first."""
    import torch

    from cases import Case

    short = {"batch": 1, "heads": 2, "kv_heads": 1}
    everything = {"left": 90, "right": 10, "softcap": 3.0, "alibi": "BH", "sinks": True, "mask": "float:1HLS", "dropout_p": 0.2}
    half, bfloat, single, double = torch.float16, torch.bfloat16, torch.float32, torch.float64
    dims = (64, 128, 96, 192, 256, 512)
    # Plain arithmetic (fp64; fp32 beyond 128 backward, beyond 256 forward) is one kernel, the slowest under racecheck.
    instances = [(bfloat, dim, 77, 133) for dim in dims] + [(single, dim, 77, 133) for dim in (64, 128, 96)]
    instances += [(single, dim, 37, 70) for dim in (192, 264)] + [(half, dim, 77, 133) for dim in dims]
    instances += [(double, dim, 37, 70) for dim in (64, 136)]
    for dtype, dim, few, many in instances:
        case = Case(f"plain-{dim}", rows=few, keys=many, head_dim=dim, right=0, bottom_right=True, **short)
        yield case, dtype, False, ""
    for dtype, dim, few, many in instances:
        yield Case(f"all-{dim}", rows=many, keys=few, head_dim=dim, **short, **everything), dtype, False, ""
    for dim in dims:
        yield Case(f"deterministic-{dim}", rows=70, keys=133, head_dim=dim, right=0, **short), bfloat, True, ""
        yield Case(f"deterministic-all-{dim}", rows=70, keys=133, head_dim=dim, **short, **everything), bfloat, True, ""
    for dtype in (bfloat, single):
        yield Case("split-keys", rows=1, keys=2000, head_dim=128, **short), dtype, False, ""
        yield (
            Case("split-keys-sinks", rows=3, keys=2000, head_dim=64, sinks=True, right=0, bottom_right=True, **short),
            dtype,
            False,
            "",
        )
        yield Case("odd-97", rows=65, keys=70, head_dim=97, value_dim=33, **short), dtype, False, ""
        yield Case("odd-100", rows=65, keys=70, head_dim=100, value_dim=40, **short), dtype, False, ""
        yield Case("odd-1", rows=17, keys=70, head_dim=1, value_dim=3, **short), dtype, False, ""
        yield Case("wide-value", rows=65, keys=70, head_dim=64, value_dim=128, **short), dtype, False, ""
        yield Case("off-by-one", rows=65, keys=130, head_dim=64, **short), dtype, False, "misaligned"
        yield Case("rows-inside", rows=65, keys=130, head_dim=64, **short), dtype, False, "rows first"
    for mask in ("bool:BHLS", "bool:B11S", "same:BHLS", "float:BHL1", "float:1111", "float:11LS"):
        yield Case(f"mask-{mask}", batch=2, heads=2, rows=65, keys=131, head_dim=64, mask=mask), bfloat, False, ""
    yield Case("window", rows=200, keys=200, head_dim=64, left=20, right=5, **short), bfloat, False, ""
    yield Case("nothing-seen", rows=130, keys=130, head_dim=64, left=-5, right=-10, **short), bfloat, False, ""
    yield (
        Case("empty-rows", rows=200, keys=65, head_dim=128, right=0, bottom_right=True, sinks=True, **short),
        bfloat,
        False,
        "",
    )
    yield Case("dropout", rows=130, keys=65, head_dim=128, dropout_p=0.5, **short), bfloat, False, ""
    yield Case("full-tiles", rows=256, keys=512, head_dim=64, **short), bfloat, False, ""
    yield Case("full-tiles", rows=256, keys=512, head_dim=128, **short), bfloat, False, ""
    yield Case("full-tiles", rows=256, keys=512, head_dim=256, **short), bfloat, False, ""


def arrange(tensor, layout: str):
    """The same numbers in another layout: [batch, rows, heads, dim] memory, or off 16-byte alignment by one element."""
    import torch

    if layout == "rows first":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "misaligned":
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)
    return tensor


def run_dense(case, dtype, deterministic: bool, layout: str) -> None:
    import torch

    from cases import make_inputs

    x = make_inputs(case, dtype, "cuda")
    q, k, v, g = (arrange(t, layout) for t in (x.query, x.key, x.value, x.grad_out))
    extras = (x.mask, x.alibi_slopes, x.sinks, x.seed)
    options = {**case.options, "deterministic": deterministic}
    out, lse = torch.ops.flash.attention_forward(q, k, v, *extras, **options)
    wanted = [True, True, True, x.mask is not None and x.mask.is_floating_point(), x.sinks is not None]
    torch.ops.flash.attention_backward(g, x.grad_lse, q, k, v, out, lse, *extras, wanted, **options)


def run_packed(case, dtype) -> None:
    import torch

    def ends(lengths):
        return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda()

    keys = case.rows if case.keys is None else case.keys
    rows_total, keys_total = sum(case.rows) + case.tail, sum(keys) + case.tail
    value_dim = case.value_dim or case.head_dim

    def normal(*size):
        return torch.randn(*size).to(dtype).cuda()

    q, k = normal(rows_total, case.heads, case.head_dim), normal(keys_total, case.kv_heads, case.head_dim)
    v, g = normal(keys_total, case.kv_heads, value_dim), normal(rows_total, case.heads, value_dim)
    lengths = (ends(case.rows), ends(keys), max(case.rows), max(keys))
    slopes = torch.rand(len(case.rows), case.heads).cuda() if case.alibi else None
    sinks = torch.randn(case.heads).cuda() if case.sinks else None
    seed = torch.rand(2, dtype=torch.float64).cuda() if case.dropout_p > 0 else None
    extras = (slopes, sinks, seed)
    out, lse = torch.ops.flash.attention_varlen_forward(q, k, v, *lengths, *extras, **case.options)
    wanted = [True, True, True, sinks is not None]
    torch.ops.flash.attention_varlen_backward(g, None, q, k, v, out, lse, *lengths, *extras, wanted, **case.options)


def run_tiles(head_dim: int) -> None:
    """Forward over more tiles than any GPU has multiprocessors; scores that grow towards the first keys make some be done again."""
    import torch

    query, key, value = (torch.randn(200, 1, 150, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    key *= torch.linspace(30, 1, 150, device="cuda", dtype=torch.bfloat16)[:, None]
    torch.ops.flash.attention_forward(query, key, value, window_right=0)


def run_small(_) -> None:
    """merge and dropout_mask."""
    import torch

    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        accumulate = torch.float64 if dtype == torch.float64 else torch.float32
        a, b = (torch.randn(2, 3, 17, 40).to(dtype).cuda() for _ in range(2))
        lse_a, lse_b = (torch.randn(2, 3, 17).to(accumulate).cuda() for _ in range(2))
        torch.ops.flash.merge(a, lse_a, b, lse_b)
    torch.ops.flash.dropout_mask(torch.rand(2, dtype=torch.float64).cuda(), [2, 3, 17, 65], 0.3)


# Clusters, one and several per head; tickets; units; pages of whole runs and others; appending; plain arithmetic.
DECODE = ("plain", "long", "group-16", "page-16", "page-3", "page-16-long", "ragged-units", "page-64-units", "many-sequences",
          "D256", "D96", "rows-40", "all", "D60", "batch-idx", "D128-causal", "D128-rings", "D128-clusters", "D128-clusters-of-4",
          "page-16-rings", "page-16-refill")  # fmt: skip


def run_decode(name: str) -> None:
    """attention_decode on a case of its tests, then cache_append_."""
    import torch

    from decode_cases import CASES, Call

    call = Call(next(case for case in CASES if case.name == name), torch.bfloat16, "cuda")
    call.run()
    query, keys, values = call.query, call.keys, call.values
    fresh = [torch.zeros(query.shape[0], x.shape[1], 2, x.shape[3], device="cuda", dtype=x.dtype) for x in (keys, values)]
    lengths = torch.full((query.shape[0],), 3, dtype=torch.int32, device="cuda")
    indices = call.indices
    torch.ops.flash.cache_append_(keys, values, *fresh, lengths, indices["block_table"], indices["cache_batch_idx"])


def inside(seconds: float, only: str, shard: int, shards: int) -> int:
    """Runs every shards-th call of the grid until the time is up. Returns the number of calls that raised or were not reached."""
    here = Path(__file__).resolve().parent
    sys.path.insert(0, str(here))
    import torch

    import flash_attn_ext  # noqa: F401  (registers torch.ops.flash)
    from cases import PACKED

    jobs: list[tuple[str, Callable[[], None]]] = []
    for case, dtype, deterministic, layout in dense_cases():
        jobs.append((f"{case} {dtype}", lambda c=case, t=dtype, d=deterministic, a=layout: run_dense(c, t, d, a)))
    packed = [(f"packed-{case}", lambda c=case: run_packed(c, torch.bfloat16)) for case in PACKED]
    decode = [(f"decode-{name}", lambda n=name: run_decode(n)) for name in DECODE]
    tiles = [(f"tiles-{dim}", lambda d=dim: run_tiles(d)) for dim in (64, 128, 256)]
    # After the first pass over types and head dims.
    jobs[19:19] = [*packed, *tiles, ("small", lambda: run_small(None)), *decode]
    jobs = [job for job in jobs if only in job[0]][shard::shards]

    torch.manual_seed(0)
    start, failed, done = time.monotonic(), 0, 0
    taken: list[tuple[float, str]] = []
    for name, job in jobs:
        begin = time.monotonic()
        if begin - start > seconds:
            break
        try:
            job()
            torch.cuda.synchronize()
        except (RuntimeError, NotImplementedError) as error:
            failed += 1
            print(f"RAISED {name}: {str(error).splitlines()[0]}", flush=True)
        taken.append((time.monotonic() - begin, name))
        done += 1
    print("slowest:", "; ".join(f"{name} {each:.1f} s" for each, name in sorted(taken, reverse=True)[:3]))
    print(f"{done} of {len(jobs)} calls in {time.monotonic() - start:.0f} s, {failed} raised", flush=True)
    return failed + len(jobs) - done


def under(tool: str, arguments: argparse.Namespace, sanitizer: str) -> bool:
    """The grid under one tool. Returns whether every call was made and nothing was found."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_MODULE_LOADING": "LAZY", "OMP_NUM_THREADS": "1"}
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FINDING), "--print-limit", "20"]
    command += ["--launch-timeout", "0", "--report-api-errors", "no"]
    if tool == "initcheck":
        environment["FLASH_ATTN_EXT_KERNEL"] = "sm80"  # it takes what Hopper's TMA stores for never written
    else:
        command += OURS
    command += [sys.executable, __file__, "--inside", "--seconds", str(arguments.seconds), "--only", arguments.only]
    command += ["--shards", str(arguments.shards), "--shard"]
    print(f"=== {tool}", flush=True)
    start = time.monotonic()

    def run(shard: int) -> bool:
        # One call can be slow under a tool: the calls stop at `seconds`, the whole process at twice that.
        process = subprocess.Popen(
            [*command, str(shard)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            lines = process.communicate(timeout=2 * arguments.seconds + 60)[0].splitlines()
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tool and the calls under it
            print(f"{tool} {shard}: OUT OF TIME", flush=True)
            return False
        done = next((line for line in reversed(lines) if " calls in " in line), "did not finish")
        found = {0: "clean", FINDING: "FINDINGS", 1: "NOT COMPLETE"}.get(process.returncode, f"STATUS {process.returncode}")
        slowest = [line for line in lines if line.startswith("slowest:")]
        text = [f"{tool} {shard}: {found}, {done}", *slowest, *([] if process.returncode == 0 else lines[:200])]
        print("\n    ".join(text), flush=True)
        return process.returncode == 0

    with ThreadPoolExecutor(arguments.shards) as pool:
        clean = all(list(pool.map(run, range(arguments.shards))))
    print(f"=== {tool}: {'clean' if clean else 'NOT CLEAN'} ({time.monotonic() - start:.0f} s)", flush=True)
    return clean


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--seconds", type=float, default=90.0, help="for the calls of one tool")
    parser.add_argument("--shards", type=int, default=8, help="processes side by side, a core and 1 GB of the GPU each")
    parser.add_argument("--only", default="", help="a part of the names of calls")
    parser.add_argument("--inside", action="store_true", help="only run the calls")
    parser.add_argument("--shard", type=int, help="with --inside: which of the shards; default: all calls")
    arguments = parser.parse_args()
    if arguments.inside:
        alone = arguments.shard is None
        shard, shards = (0, 1) if alone else (arguments.shard, arguments.shards)
        return 1 if inside(arguments.seconds, arguments.only, shard, shards) else 0
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        print("No compute-sanitizer on PATH: it comes with the CUDA toolkit, or pip install nvidia-cuda-sanitizer-api.")
        return 1
    clean = [under(tool, arguments, sanitizer) for tool in arguments.tools]
    return 0 if all(clean) else 1


if __name__ == "__main__":
    sys.exit(main())
