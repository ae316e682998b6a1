"""python -m flash_attn_ext: is this installation sound, what can this machine run, how fast is it beside torch's own SDPA?

Prints a report to paste into an issue (progress goes to stderr) and exits with 1 if anything is wrong.
`--cmake` prints the prefix for CMake's find_package(flash_attn_ext) and nothing else.
"""

import argparse
import platform
import sys
import time
from collections.abc import Iterator

import torch

from . import __version__, _selfcheck, explain
from ._load import build_info, cmake_prefix
from ._progress import Progress
from ._selfcheck import CASES, DTYPES, RIVALS, Check, Workload


def unusable_gpu() -> str:
    """Why the kernels cannot run on the GPU of this machine; "" if they can."""
    if not torch.cuda.is_available():
        return "none that torch can use"
    if not build_info()["cuda"]:
        return "not used: this build has no CUDA kernels; install a CUDA compiler (nvcc) and build again"
    if torch.cuda.get_device_capability() < (8, 0):
        return "not used: the kernels need compute capability 8.0 (Ampere) or newer"
    return ""


def devices() -> list[str]:
    return ["cpu"] if unusable_gpu() else ["cpu", "cuda"]


def short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}[dtype]


def environment() -> Iterator[tuple[str, str]]:
    info = build_info()
    yield (
        "flash_attn_ext",
        f"{__version__}, commit {info['commit'] or 'unknown'}, built for torch {info['torch']} by {info['compiler']}",
    )
    yield (
        "kernels",
        f"CPU; CUDA {info['cuda']} for {info['archs']}" if info["cuda"] else "CPU only: built without a CUDA compiler",
    )
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, cuDNN {torch.backends.cudnn.version() or 'none'}"
    yield "Python", f"{platform.python_version()} on {platform.platform()}"
    yield "CPU", f"{processor()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        yield f"GPU {index}", f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
    if reason := unusable_gpu():
        yield "GPU", reason


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def kernels(device: str) -> Iterator[tuple[str, str]]:
    """The first line of what explain() says about a common call of each dtype."""
    for dtype in DTYPES:
        tensor = torch.empty(1, 8, 1024, 64, dtype=dtype, device=device)
        yield f"{device} {short(dtype)}", explain(tensor, tensor, tensor, causal=True).splitlines()[0]


def correctness(device: str, progress: Progress) -> Iterator[tuple[torch.dtype, list[Check]]]:
    for dtype in DTYPES:
        checks: list[Check] = []
        for case in CASES:
            progress.step(f"{device} {short(dtype)}: {case.name}")
            checks += _selfcheck.check_case(case, dtype, device)
        progress.step(f"{device} {short(dtype)}: packed sequences")
        checks += _selfcheck.check_packed(dtype, device)
        yield dtype, checks


def speed(device: str, progress: Progress) -> Iterator[tuple[str, ...]]:
    """Rows (setting, who, forward, backward, memory)."""
    settings = [(torch.bfloat16, (2, 16, 4096, 128)), (torch.float32, (2, 16, 2048, 64))]
    if device == "cpu":
        settings = [(torch.float32, (1, 4, 1024, 64)), (torch.bfloat16, (1, 4, 512, 64))]
    for dtype, shape in settings:
        title = f"{device} {short(dtype)} {list(shape)}"
        workload = Workload(dtype, device, shape)
        times = {}
        for name, function in RIVALS.items():
            progress.step(f"{title}: {name}")
            times[name] = workload.speed(function)
        for name, function in RIVALS.items():
            memory = workload.memory(function)
            megabytes = "-" if memory is None else f"{memory / 2**20:.1f}"
            yield title, name, f"{times[name].forward * 1e3:.2f}", f"{times[name].backward * 1e3:.2f}", megabytes
            title = ""


def table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _summary(device: str, dtype: torch.dtype, checks: list[Check]) -> tuple[str, ...]:
    bad = [check for check in checks if not check.ok]
    worst = max(checks, key=lambda check: check.error / check.allowed if check.allowed else 0.0)
    verdict = "ok" if not bad else f"WRONG: {len(bad)}"
    return (
        device,
        short(dtype),
        str(len(checks)),
        verdict,
        f"{worst.error:.1e} of {worst.allowed:.1e} ({worst.case}: {worst.quantity})",
    )


def report() -> bool:
    """Prints everything; says whether all is well."""
    present = devices()
    progress = Progress(len(present) * (len(DTYPES) * (len(CASES) + 1) + 2 * len(RIVALS)))
    start = time.monotonic()
    print(table(list(environment())), "\n", flush=True)
    summary: list[tuple[str, ...]] = [("device", "dtype", "checks", "result", "largest error of what is allowed")]
    failures: list[tuple[str, ...]] = []
    times: list[tuple[str, ...]] = [("causal, [B, H, L, E]", "who", "forward ms", "backward ms", "peak MiB, results included")]
    for device in present:
        print(table(list(kernels(device))), "\n", flush=True)
        for dtype, checks in correctness(device, progress):
            summary.append(_summary(device, dtype, checks))
            failures += [
                (
                    f"{device} {short(dtype)}",
                    check.case,
                    check.quantity,
                    f"error {check.error:.2e}, allowed {check.allowed:.2e}",
                )
                for check in checks
                if not check.ok
            ]
        times += speed(device, progress)
    progress.close()
    print(table(summary), "\n")
    if failures:
        print(table(failures), "\n")
    print(table(times), "\n")
    verdict = "Something is wrong: please report the lines above." if failures else "All is well."
    print(f"{verdict} ({time.monotonic() - start:.0f} s)")
    return not failures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flash_attn_ext", description="Checks this installation of flash_attn_ext.")
    parser.add_argument("--cmake", action="store_true", help="print the CMake prefix (for CMAKE_PREFIX_PATH) and exit")
    if parser.parse_args().cmake:
        print(cmake_prefix())
        return 0
    return 0 if report() else 1


if __name__ == "__main__":
    sys.exit(main())
