"""Finds nvcc: in CUDA_HOME, on PATH, in pip's nvidia/cu* directories. Used by CMake (prints the path) and by setup.py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def candidates() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "bin" / "nvcc"
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path)
    # Under build isolation sys.path holds the build environment, sysconfig the user's.
    for directory in dict.fromkeys([*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]):
        yield from sorted(Path(directory).glob("nvidia/cu[0-9]*/bin/nvcc"), reverse=True)
    yield Path("/usr/local/cuda/bin/nvcc")


def version(nvcc: Path) -> tuple[int, int] | None:
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    match = re.search(r"release (\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def resolve(nvcc: Path) -> Path:
    """The compiler itself: /usr/local/bin/nvcc may be a script that starts one elsewhere, beside which the headers lie."""
    text = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True).stderr
    match = re.search(r"^#\$ _HERE_=(.+)$", text, re.MULTILINE)
    inner = Path(match[1].strip()) / "nvcc" if match else nvcc
    return inner if inner.exists() else nvcc


def find(torch_cuda: str) -> Path | None:
    """torch_cuda: the CUDA version torch was built for ("13.0"); nvcc must have the same major version. "" takes any >= 12."""
    for nvcc in candidates():
        found = version(nvcc) if nvcc.exists() else None
        if found and (found[0] == int(torch_cuda.split(".")[0]) if torch_cuda else found[0] >= 12):
            return resolve(nvcc)
    return None


if __name__ == "__main__":
    print(find(sys.argv[1]) or "")
