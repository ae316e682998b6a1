"""The installed package: what is in it, what it says about itself, what it refuses; and the decisions of setup.py."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flash_attn_ext import _load

ROOT = Path(__file__).resolve().parent.parent


def output(*command: str | Path, **options) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, **options).stdout


def test_build_info_names_the_torch_that_runs() -> None:
    info = _load.build_info()
    assert info.keys() == {"version", "torch", "cuda", "archs", "compiler", "commit"}
    assert info["torch"].split(".")[:2] == torch.__version__.split(".")[:2]
    assert bool(info["cuda"]) == bool(info["archs"])


@pytest.mark.parametrize("running", ["2.11.0", "2.11.3", "2.11.0+cu130", "2.11.1.dev20260101+cpu"])
def test_a_torch_of_the_same_minor_release_is_accepted(running: str) -> None:
    _load.check_torch(running, "2.11.0+cu130")


@pytest.mark.parametrize("running", ["2.12.0", "2.1.0", "3.11.0", "2.110.0"])
def test_another_torch_is_refused_with_the_command_that_cures_it(running: str) -> None:
    with pytest.raises(ImportError) as error:
        _load.check_torch(running, "2.11.0+cu130")
    text = str(error.value)
    assert f"built for torch 2.11.0+cu130, but torch {running} is running" in text
    assert f"{sys.executable} -m pip install --force-reinstall --no-deps" in text
    assert "\n" not in text


def test_another_torch_is_refused_before_the_library_is_loaded() -> None:
    code = "import torch; torch.__version__ = '9.9.0'\ntry: import flash_attn_ext\nexcept ImportError as error: print(error)\n"
    code += "print(hasattr(torch.ops.flash, 'attention'))"
    text = output(sys.executable, "-c", code, cwd="/")
    assert "torch 9.9.0 is running" in text
    assert text.endswith("False\n")


@pytest.mark.parametrize(
    "origin, source",
    [
        (None, "flash_attn_ext"),
        ('{"url": "file:///a%20b/flash", "dir_info": {}}', "'/a b/flash'"),
        ('{"url": "file:///a/flash", "dir_info": {"editable": true}}', "--editable /a/flash"),
        ('{"url": "file:///a/flash_attn_ext-0.1.0.tar.gz", "archive_info": {}}', "/a/flash_attn_ext-0.1.0.tar.gz"),
        (
            '{"url": "file:///a/flash_attn_ext-0.1.0%2Bpt211cpu-cp311-cp311-linux_x86_64.whl", "archive_info": {}}',
            "flash_attn_ext",
        ),
        ('{"url": "https://host/flash.git", "vcs_info": {}}', "flash_attn_ext"),
    ],
)
def test_a_rebuild_starts_from_sources(origin: str | None, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a wheel pip would install the same build again, for the torch that is not there."""

    class Distribution:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return origin

    monkeypatch.setattr(_load.importlib.metadata, "distribution", lambda name: Distribution())
    assert _load._source() == source


def test_no_torch_is_said_with_the_command_that_installs_it() -> None:
    minor = ".".join(torch.__version__.split(".")[:2])
    directory = str(Path(_load.cmake_prefix()).parent)
    code = f"import sys; sys.path[:] = [{directory!r}, *(p for p in sys.path if 'site-packages' not in p)]\n"
    code += "sys.modules['torch'] = None\n"
    code += "try: import flash_attn_ext\nexcept ModuleNotFoundError as error: print(error, error.name)"
    text = output(sys.executable, "-c", code, cwd="/")
    assert text.endswith(f"there is no torch here; install it with: {sys.executable} -m pip install 'torch=={minor}.*' torch\n")


def test_loading_twice_is_harmless() -> None:
    before = torch.ops.flash.attention
    _load.load()
    assert torch.ops.flash.attention is before


def test_a_source_tree_uses_what_is_installed(tmp_path: Path) -> None:
    """`pip install . && python -m flash_attn_ext` in the clone: Python puts the clone, which has no library, first."""
    package = tmp_path / "flash_attn_ext"
    package.mkdir()
    for file in Path(_load.__file__).parent.glob("*.py"):
        shutil.copy(file, package)
    environment = {**os.environ, "PYTHONPATH": str(Path(_load.cmake_prefix()).parent)}
    code = "import flash_attn_ext, torch; print(flash_attn_ext.__file__); print(torch.ops.flash.attention)"
    text = output(sys.executable, "-c", code, cwd=tmp_path, env=environment)
    assert text.splitlines() == [str(package / "__init__.py"), "flash.attention"]


def test_a_source_tree_without_a_build_says_how_to_build(tmp_path: Path) -> None:
    package = tmp_path / "flash_attn_ext"
    package.mkdir()
    shutil.copy(Path(_load.__file__), package)
    (package / "__init__.py").write_text("from . import _load")
    code = f"import sys; sys.path[:] = [p for p in sys.path if p != {str(Path(_load.cmake_prefix()).parent)!r}]\n"
    code += "import importlib.machinery as m; sys.meta_path[:] = [m.BuiltinImporter, m.FrozenImporter, m.PathFinder]\n"
    code += f"sys.path.insert(0, {str(tmp_path)!r}); import flash_attn_ext\n"
    code += "try: flash_attn_ext._load.load()\nexcept ImportError as error: print(error)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    text = output(sys.executable, "-c", code, cwd="/", env=environment)
    assert text == (
        f"flash_attn_ext is not built: neither '{package}' nor another flash_attn_ext on sys.path holds libflash_attn_ext.so; "
        f"build it with: {sys.executable} -m pip install {tmp_path}\n"
    )


def test_the_prefix_has_what_a_cpp_program_needs() -> None:
    prefix = Path(_load.cmake_prefix())
    assert output(sys.executable, "-m", "flash_attn_ext", "--cmake", cwd="/").strip() == str(prefix)
    for name in (
        "libflash_attn_ext.so",
        "include/flash_attn_ext/attention.h",
        "share/cmake/flash_attn_ext/flash_attn_ext-config.cmake",
        "share/cmake/flash_attn_ext/flash_attn_ext-config-version.cmake",
        "share/cmake/flash_attn_ext/flash_attn_ext-torch.cmake",
        "py.typed",
        "_C.pyi",
    ):
        assert (prefix / name).is_file(), name


@pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake")
def test_a_package_without_torch_beside_it_says_how_to_name_one(tmp_path: Path) -> None:
    """As in an editable install, or where a virtual environment sees the packages of another."""
    files = shutil.copytree(Path(_load.cmake_prefix()) / "share", tmp_path / "flash_attn_ext" / "share")
    config = files / "cmake" / "flash_attn_ext" / "flash_attn_ext-config.cmake"
    done = subprocess.run(["cmake", "-P", config], capture_output=True, text=True)
    text = re.sub(r"\s+", " ", done.stderr)
    assert done.returncode != 0
    assert f"no torch beside flash_attn_ext, in '{tmp_path}/torch': name it with -Dflash_attn_ext_TORCH=" in text


@pytest.mark.skipif(not shutil.which("readelf") or not shutil.which("nm"), reason="needs binutils")
def test_the_library_knows_no_python_and_no_absolute_path() -> None:
    library = Path(_load.cmake_prefix()) / "libflash_attn_ext.so"
    undefined = output("nm", "-D", "--undefined-only", library).split()
    assert [name for name in undefined if name.startswith(("Py", "_Py"))] == []
    dynamic = [line for line in output("readelf", "-d", library).splitlines() if "RUNPATH" in line or "RPATH" in line]
    assert len(dynamic) == 1
    paths = dynamic[0].split("[")[1].rstrip("]").split(":")
    assert paths[0] == "$ORIGIN"
    assert all(path.startswith("$ORIGIN") for path in paths)


@pytest.mark.skipif(not shutil.which("nm"), reason="needs binutils")
def test_the_library_exports_only_its_header() -> None:
    """Kernels and torch's inline functions stay inside: another library may have others of the same names."""
    symbols = output("nm", "-DC", "--defined-only", Path(_load.cmake_prefix()) / "libflash_attn_ext.so").splitlines()
    strong = {re.split(r"[\[(]", line.split(maxsplit=2)[2])[0] for line in symbols if line.split(maxsplit=2)[1] in "TDBR"}
    header = (Path(_load.cmake_prefix()) / "include" / "flash_attn_ext" / "attention.h").read_text()
    strong -= {"__bss_start", "_edata", "_end", "_fini", "_init"}  # the linker's own
    assert strong
    for name in strong:
        assert re.search(rf"FLASH_ATTN_EXT_API [^;(]*\b{name.removeprefix('flash::')}\(", header), name


def test_cmake_lists_every_source() -> None:
    text = (ROOT / "CMakeLists.txt").read_text()
    for source in [*(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "csrc").rglob("*.cu")]:
        name = source.stem if source.parent.name == "instances" else str(source.relative_to(ROOT))
        assert name in re.split(r"[\s()]+", text), source
    tests = (ROOT / "tests" / "cpp" / "CMakeLists.txt").read_text()
    for source in (ROOT / "tests" / "cpp").glob("*.cpp"):
        assert source.name in tests, source


# --- setup.py -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def setup_py(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip("setuptools >= 77 builds this project")
    for name in ("FLASH_ATTN_EXT_CUDA", "MAX_JOBS", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))  # setup.py adds cmake/
    spec = importlib.util.spec_from_file_location("setup_py", ROOT / "setup.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "setup_py", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def make_nvcc(directory: Path, release: str) -> Path:
    nvcc = directory / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "Cuda compilation tools, release {release}, V{release}.88"\n')
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    return nvcc


@pytest.fixture
def only_nvcc(setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Makes one compiler, or none, the only one on the machine."""

    def choose(release: str | None) -> None:
        found = [make_nvcc(tmp_path / release, release)] if release else []
        monkeypatch.setattr(setup_py.find_nvcc, "candidates", lambda: iter(found))

    return choose


def test_setup_finds_the_torch_of_this_environment(setup_py: ModuleType) -> None:
    found = setup_py.find_torch()
    assert found is not None
    assert (found.version, found.cuda) == (torch.__version__, torch.version.cuda or "")
    assert found.directory == Path(torch.__file__).parent


@pytest.mark.parametrize(
    ("torch_version", "torch_cuda", "nvcc", "wanted", "needed", "label"),
    [
        ("2.11.0+cu130", "13.0", "13.0", "", [], "+pt211cu130"),
        ("2.11.0+cu130", "13.0", "13.2", "", [], "+pt211cu130"),
        ("2.11.0+cu130", "13.0", "12.8", "", ["cuda-toolkit[nvcc,cccl,cudart,crt,nvvm]==13.0.*"], "+pt211cpu"),
        ("2.11.0+cu130", "13.0", None, "", ["cuda-toolkit[nvcc,cccl,cudart,crt,nvvm]==13.0.*"], "+pt211cpu"),
        ("2.11.0+cu130", "13.0", None, "0", [], "+pt211cpu"),
        ("2.11.0+cu130", "13.0", "13.0", "0", [], "+pt211cpu"),
        ("2.14.1+cu128", "12.8", "12.9", "", [], "+pt214cu128"),
        ("2.14.1+cu128", "12.8", "13.0", "", [], "+pt214cpu"),
        ("2.13.0+cpu", "", "13.0", "", [], "+pt213cpu"),
        ("2.13.0+cpu", "", None, "", [], "+pt213cpu"),
    ],
)
def test_what_a_build_needs_and_how_it_is_named(
    setup_py, only_nvcc, monkeypatch, torch_version, torch_cuda, nvcc, wanted, needed, label
) -> None:
    only_nvcc(nvcc)
    if wanted:
        monkeypatch.setenv("FLASH_ATTN_EXT_CUDA", wanted)
    found = setup_py.Torch(Path("/torch"), torch_version, torch_cuda)
    assert setup_py.requirements(found) == needed
    assert setup_py.version(found) == _load.version() + label


def test_without_torch_pip_is_asked_for_it(setup_py: ModuleType, only_nvcc, monkeypatch: pytest.MonkeyPatch) -> None:
    only_nvcc(None)
    assert setup_py.requirements(None) == ["torch>=2.11", "cuda-toolkit[nvcc,cccl,cudart,crt,nvvm]>=13"]
    monkeypatch.setenv("FLASH_ATTN_EXT_CUDA", "0")
    assert setup_py.requirements(None) == ["torch>=2.11"]


def test_jobs_follow_the_environment_and_free_memory(setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(setup_py, "free_memory", lambda: 5 << 30)
    assert setup_py.jobs() == min(cores, 2)
    monkeypatch.setattr(setup_py, "free_memory", lambda: 1 << 30)
    assert setup_py.jobs() == 1
    monkeypatch.setenv("MAX_JOBS", "7")
    assert setup_py.jobs() == 7


@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="needs a clone")
def test_an_sdist_has_every_file(setup_py: ModuleType, tmp_path: Path) -> None:
    tracked = output("git", "-C", ROOT, "ls-files").splitlines()
    clone = tmp_path / "clone"
    for name in tracked:
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    output(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", tmp_path, cwd=clone)
    (archive,) = tmp_path.glob("*.tar.gz")
    assert archive.name == f"flash_attn_ext-{_load.version()}.tar.gz"  # no torch in its name: it fits any
    with tarfile.open(archive) as file:
        packed = {name.split("/", 1)[1] for name in file.getnames() if "/" in name}
    not_needed = {".gitignore", ".pre-commit-config.yaml"}
    assert sorted(set(tracked) - packed - not_needed) == []
