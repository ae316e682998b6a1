"""The table of all CUDA kernels of a build: seconds, registers, stack, spills and code bytes, per kernel and architecture.

    python tools/kernel_report.py build/dev [--csv benchmarks/results/kernels.csv] [--arch sm_90]

Reads the `.ptxas` files that the build keeps beside each object, and the machine code with cuobjdump where there is one.
Exit status 1 if ptxas gave a C75xx warning (serialised wgmma) or if a hot kernel has a stack frame that spills do not explain:
that is an array in local memory, ten times slower than registers.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from dataclasses import astuple, dataclass, fields
from pathlib import Path

HOT = re.compile(r"^(sm\d+)::(forward|backward)\w*kernel")


@dataclass
class Kernel:
    source: str
    arch: str
    kernel: str  # demangled, without arguments
    registers: int
    stack: int  # bytes per thread
    spill_stores: int  # bytes per thread
    spill_loads: int
    code_bytes: int | None  # of machine code; None without cuobjdump
    source_seconds: float  # of one core, for the whole source file and all architectures; a ccache hit is nearly none

    @property
    def local_array(self) -> bool:
        """A stack frame larger than what the spills need; frames are multiples of 8 bytes."""
        return self.stack > -(-max(self.spill_stores, self.spill_loads) // 8) * 8


def tool(name: str) -> str | None:
    """A CUDA binary tool: from PATH, the toolkit, or the copy that Triton carries."""
    places = [shutil.which(name)]
    places += [
        os.path.join(os.environ[variable], "bin", name) for variable in ("CUDA_HOME", "CUDA_PATH") if variable in os.environ
    ]
    if spec := importlib.util.find_spec("triton"):
        places.append(str(Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name))
    return next((place for place in places if place and os.path.exists(place)), None)


def demangle(names: list[str]) -> dict[str, str]:
    """mangled -> readable, without return types and the namespaces that all kernels share."""
    if not names or not shutil.which("c++filt"):
        return {name: name for name in names}
    text = subprocess.run(["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    short = [re.sub(r"^void |\(anonymous namespace\)::|flash::|cuda::", "", line) for line in text.splitlines()]
    return dict(zip(names, short, strict=True))


def code_sizes(object_file: Path, cuobjdump: str) -> dict[tuple[str, str], int]:
    """(architecture, mangled kernel) -> bytes of its .text section."""
    sizes = {}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([cuobjdump, "-xelf", "all", str(object_file.resolve())], cwd=folder, capture_output=True, check=False)
        for cubin in Path(folder).glob("*.cubin"):
            arch = re.search(r"sm_\d+a?", cubin.name)[0]
            sizes |= {(arch, name): size for name, size in text_sections(cubin.read_bytes())}
    return sizes


def text_sections(elf: bytes) -> list[tuple[str, int]]:
    """Names (without ".text.") and sizes of the code sections of a 64-bit ELF file; see elf(5)."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQ", elf, table + i * entry_size) for i in range(count)
    ]  # name, type, flags, address, offset, size
    names = headers[names_index][4]
    found = []
    for name, _, _, _, _, size in headers:
        end = elf.index(b"\0", names + name)
        text = elf[names + name : end].decode()
        if text.startswith(".text."):
            found.append((text.removeprefix(".text."), size))
    return found


def read(report: Path, build: Path, cuobjdump: str | None) -> list[Kernel]:
    text = report.read_text()
    seconds = float(re.match(r"seconds ([\d.]+)", text)[1])
    object_file = report.with_suffix("")
    sizes = code_sizes(object_file, cuobjdump) if cuobjdump and object_file.exists() else {}
    source = re.sub(r".*?\.dir/|\.o$", "", str(object_file.relative_to(build)))
    kernels = []
    blocks = re.split(r"Compiling entry function ", text)[1:]
    for block in blocks:
        name, arch = re.match(r"'(\w+)' for '(\w+)'", block).groups()
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", block)
        registers = re.search(r"Used (\d+) registers", block)
        stack, stores, loads = (int(number) for number in frame.groups())
        kernels.append(Kernel(source, arch, name, int(registers[1]), stack, stores, loads, sizes.get((arch, name)), seconds))
    readable = demangle([kernel.kernel for kernel in kernels])
    for kernel in kernels:
        kernel.kernel = re.sub(r"\(\w[\w:]*\)", "", readable[kernel.kernel])  # casts of enums
    return kernels


def show(kernels: list[Kernel]) -> None:
    print(f"{'seconds':>7} {'arch':6} {'regs':>4} {'stack':>5} {'spill st/ld':>11} {'bytes':>7}  kernel")
    for k in kernels:
        spills = f"{k.spill_stores}/{k.spill_loads}"
        size = "" if k.code_bytes is None else k.code_bytes
        print(f"{k.source_seconds:7.1f} {k.arch:6} {k.registers:4} {k.stack:5} {spills:>11} {size:>7}  {k.kernel}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path, help="a CMake build directory")
    parser.add_argument("--csv", type=Path, help="also write the table there")
    parser.add_argument("--arch", default="", help="show this architecture only, e.g. sm_90")
    arguments = parser.parse_args()

    reports = sorted(arguments.build.rglob("*.ptxas"))
    if not reports:
        print(f"No .ptxas files under {arguments.build}: build the CUDA kernels there first.")
        return 1
    cuobjdump = tool("cuobjdump")
    kernels = [kernel for report in reports for kernel in read(report, arguments.build, cuobjdump)]
    show([kernel for kernel in kernels if arguments.arch in kernel.arch])
    seconds = {kernel.source: kernel.source_seconds for kernel in kernels}
    total = sum(kernel.code_bytes or 0 for kernel in kernels)
    print(
        f"{len(seconds)} sources, {len(kernels)} kernels, {sum(seconds.values()):.0f} s of one core, {total / 1e6:.1f} MB of code."
    )
    if arguments.csv:
        arguments.csv.parent.mkdir(parents=True, exist_ok=True)
        with arguments.csv.open("w", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow([field.name for field in fields(Kernel)])
            table.writerows(astuple(kernel) for kernel in kernels)

    faults = [
        f"{report}: {line}" for report in reports for line in report.read_text().splitlines() if re.search(r"C75\d\d", line)
    ]
    faults += [
        f"{kernel.kernel} for {kernel.arch}: {kernel.stack} bytes of stack, but spills of {kernel.spill_stores}/{kernel.spill_loads}"
        for kernel in kernels
        if HOT.search(kernel.kernel) and kernel.local_array
    ]
    for fault in faults:
        print("FAULT", fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
