"""Fixtures and options of the whole suite.

`device` runs a test on every device at hand; the CUDA half carries the mark `cuda`. `--device cpu|cuda` (or the environment
variable FLASH_TEST_DEVICE) keeps one of them, and so does `-m cuda` / `-m "not cuda"`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
# `python -m pytest` puts the checkout first on the path, where the package has no built library: prefer the installed one.
if not any((ROOT / "flash_attn_ext").glob("*.so")):
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT] + [str(ROOT)]

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch's deterministic mode asks for it, before cuBLAS starts

import flash_attn_ext  # noqa: E402  (registers torch.ops.flash)


def has_cuda() -> bool:
    """A GPU is there and the library was built with its kernels."""
    return torch.cuda.is_available() and torch._C._dispatch_has_kernel_for_dispatch_key("flash::attention_forward", "CUDA")


def chosen_devices(config: pytest.Config) -> list:
    choice = config.getoption("--device")
    if choice == "cuda" and not has_cuda():
        raise pytest.UsageError("--device cuda: no GPU, or the library was built without CUDA kernels")
    devices = []
    if choice in ("all", "cpu"):
        devices.append(pytest.param("cpu", id="cpu"))
    if choice in ("all", "cuda") and has_cuda():
        devices.append(pytest.param("cuda", marks=pytest.mark.cuda, id="cuda"))
    return devices


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("all", "cpu", "cuda"),
        default=os.environ.get("FLASH_TEST_DEVICE", "all"),
        help="run the device tests on one device only",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda: needs a GPU and a library built for it")
    config.addinivalue_line("markers", "slow: takes more than a few seconds")
    config.addinivalue_line("markers", "big: needs many GiB of GPU memory; skips itself where they are not free")


def pytest_report_header(config: pytest.Config) -> str:
    where = torch.cuda.get_device_name() if has_cuda() else "none" if not torch.cuda.is_available() else "not built for it"
    return f"torch {torch.__version__}, GPU: {where}, threads: {torch.get_num_threads()}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", chosen_devices(metafunc.config), scope="session")


@pytest.fixture
def cuda() -> str:
    """For tests that make sense on a GPU only."""
    if not has_cuda():
        pytest.skip("needs a GPU and a library built for it")
    return "cuda"


@pytest.fixture
def hopper_kernels(cuda: str) -> None:
    """For tests of the Hopper kernels: skips where the GPU or the build lacks them."""
    query = torch.empty(1, 1, 128, 64, device=cuda, dtype=torch.bfloat16)
    if "backward pass runs the sm90 kernels" not in flash_attn_ext.explain(query, query, query):
        pytest.skip("needs compute capability 9.0 and a build for it")


@pytest.fixture
def deterministic():
    """Bitwise reproducible gradients on every device, for tests that compare two runs of one call."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def same_random_numbers():
    """Every test draws the same numbers, alone or in the suite, and leaves torch's global switches as they were."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    assert not torch.are_deterministic_algorithms_enabled(), "a test left the deterministic mode on"
