"""Finds torch and a CUDA compiler, drives cmake and ninja, names the wheel.

Static metadata is in pyproject.toml, sources are in CMakeLists.txt. Read from the environment: FLASH_ATTN_EXT_CUDA (1, 0;
unset: if torch is a CUDA build), TORCH_CUDA_ARCH_LIST, CUDA_HOME, MAX_JOBS, CMAKE_ARGS, CMAKE_CXX_COMPILER_LAUNCHER and
CMAKE_CUDA_COMPILER_LAUNCHER (sccache or ccache is used when there is one).
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "cmake"))
import find_nvcc  # noqa: E402

OLDEST_TORCH = (2, 11)
BYTES_PER_JOB = 2 << 30  # the largest translation units take a little less


@dataclass(frozen=True)
class Torch:
    directory: Path
    version: str  # "2.11.0+cu130"
    cuda: str  # "13.0", "" for a CPU build

    @property
    def minor(self) -> tuple[int, int]:
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)


def torch_directories() -> Iterator[Path]:
    """pip hides the user's packages from an isolated build, but sysconfig still names the environment that the wheel is for."""
    yield Path(sysconfig.get_path("purelib")) / "torch"
    yield Path(sysconfig.get_path("platlib")) / "torch"
    spec = importlib.util.find_spec("torch")  # the build environment, and whatever else this Python imports
    if spec and spec.origin:
        yield Path(spec.origin).parent


def find_torch() -> Torch | None:
    """Read from its files: importing it would need the user's whole environment."""
    for directory in torch_directories():
        try:
            text = (directory / "version.py").read_text()
        except OSError:
            continue
        version = re.search(r"^__version__\b[^'\"\n]*['\"]([^'\"]+)", text, re.MULTILINE)
        cuda = re.search(r"^cuda\b[^'\"\n]*['\"]([^'\"]+)", text, re.MULTILINE)
        if version:
            torch = Torch(directory, version[1], cuda[1] if cuda else "")
            if torch.minor >= OLDEST_TORCH:  # an older one is as good as none: pip will replace it
                return torch
    return None


def cuda_wanted() -> str:
    """For CMake: ON, OFF or AUTO."""
    value = os.environ.get("FLASH_ATTN_EXT_CUDA", "").upper()
    return {"": "AUTO", "1": "ON", "0": "OFF"}.get(value, value)


def requirements(torch: Torch | None) -> list[str]:
    """What pip must put into the build environment besides pyproject.toml's list.

    Without a torch, the newest one, which is what pip then installs for the user as well; without an nvcc, CUDA 13's from PyPI.
    """
    cuda = torch.cuda if torch else "13"  # what PyPI's torch for Linux is built with
    needed = [] if torch else ["torch>=" + ".".join(map(str, OLDEST_TORCH))]
    if cuda_wanted() != "OFF" and cuda and int(cuda.split(".")[0]) >= 13 and find_nvcc.find(cuda) is None:
        needed.append("cuda-toolkit[nvcc,cccl,cudart,crt,nvvm]" + (f"=={cuda}.*" if torch else ">=13"))
    return needed


def version(torch: Torch | None) -> str:
    """CMakeLists.txt's; a wheel also says which torch and CUDA it was built for: 0.1.0+pt211cu130."""
    match = re.search(r"project\(flash_attn_ext VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())
    assert match, "CMakeLists.txt has no project(flash_attn_ext VERSION ...)"
    if torch is None or "sdist" in sys.argv:
        return match[1]
    kernels = cuda_wanted() != "OFF" and torch.cuda and find_nvcc.find(torch.cuda)
    return match[1] + "+pt" + "".join(map(str, torch.minor)) + ("cu" + torch.cuda.replace(".", "") if kernels else "cpu")


def free_memory() -> int:
    """Bytes, within the container's limit if there is one."""
    free = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    try:
        match = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        if match:
            free = [int(match[1]) << 10]
        group = Path("/sys/fs/cgroup")
        free.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        pass
    return min(free)


def jobs() -> int:
    if os.environ.get("MAX_JOBS"):
        return int(os.environ["MAX_JOBS"])
    return max(1, min(len(os.sched_getaffinity(0)), free_memory() // BYTES_PER_JOB))


def program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))  # a venv that is not activated
    if not found:
        raise SystemExit(f"flash_attn_ext needs {name} to build: pip install {name}")
    return found


def launchers() -> list[str]:
    cache = shutil.which("sccache") or shutil.which("ccache")
    names = ("CMAKE_CXX_COMPILER_LAUNCHER", "CMAKE_CUDA_COMPILER_LAUNCHER")
    return [f"-D{name}={cache}" for name in names if cache and name not in os.environ]


class CMakeBuild(build_ext):
    """Builds in build/<python>-torch<version>, so that a second install recompiles only what changed."""

    def run(self) -> None:
        if TORCH is None:
            oldest = ".".join(map(str, OLDEST_TORCH))
            raise SystemExit(f"flash_attn_ext needs torch >= {oldest}, and {sys.executable} has none: pip install torch")
        here = self.inplace or getattr(self, "editable_mode", False)
        package = ROOT / "flash_attn_ext" if here else Path(self.build_lib).resolve() / "flash_attn_ext"
        build = ROOT / "build" / f"{sys.implementation.cache_tag}-torch{TORCH.version}"
        # Paths of a build environment that pip has deleted since; the objects stay.
        (build / "CMakeCache.txt").unlink(missing_ok=True)
        for stale in (build / "CMakeFiles").glob("[0-9]*"):
            shutil.rmtree(stale)

        cmake, ninja = program("cmake"), program("ninja")
        environment = {**os.environ, "NINJA_STATUS": os.environ.get("NINJA_STATUS", "[%f/%t %es] ")}
        options = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_MAKE_PROGRAM": ninja,
            "Python_EXECUTABLE": sys.executable,
            "FLASH_ATTN_EXT_TORCH": TORCH.directory,
            "FLASH_ATTN_EXT_CUDA": cuda_wanted(),
        }
        configure = [cmake, "-S", str(ROOT), "-B", str(build), "-G", "Ninja"]
        configure += [f"-D{name}={value}" for name, value in options.items()] + launchers()
        print(f"flash_attn_ext: building for torch {TORCH.version} with {jobs()} jobs in {build}", flush=True)
        for command in (
            configure + shlex.split(os.environ.get("CMAKE_ARGS", "")),
            [cmake, "--build", str(build), "--parallel", str(jobs())],
            [cmake, "--install", str(build), "--prefix", str(package)],
        ):
            try:
                subprocess.run(command, env=environment, check=True)
            except subprocess.CalledProcessError as error:
                raise SystemExit(f"flash_attn_ext: this failed, see above: {shlex.join(command)}") from error

    def get_output_mapping(self) -> dict[str, str]:
        return {}  # an editable install finds what run() wrote beside the sources


class CleanBuildPy(build_py):
    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)  # else modules deleted since the last build end up in the wheel
        super().run()


TORCH = find_torch()

if __name__ == "__main__":
    setup(
        version=version(TORCH),
        setup_requires=requirements(TORCH),
        ext_modules=[Extension("flash_attn_ext._C", sources=[])],  # makes the wheel a platform wheel; CMake builds it
        cmdclass={"build_ext": CMakeBuild, "build_py": CleanBuildPy},
    )
