"""Loads the compiled half of the package: _C (what this build is) and libflash_attn_ext.so (registers torch.ops.flash).

Importing torch first is what lets the library find torch's own; a torch that the library was not built for is refused here,
because it may load all the same and then read torch's objects in the wrong layout.
"""

from __future__ import annotations

import importlib.metadata
import json
import pkgutil
import shlex
import sys
from pathlib import Path
from urllib.parse import unquote, urlparse

_LIBRARY = "libflash_attn_ext.so"


def _source() -> str:
    """What to give pip to build this installation again: the sources it came from if pip wrote that down, else the name. A wheel would
    only install the same build once more."""
    try:
        text = importlib.metadata.distribution("flash_attn_ext").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        text = None
    origin = json.loads(text) if text else {}
    location = urlparse(origin.get("url", ""))
    if location.scheme != "file" or location.path.endswith(".whl"):
        return "flash_attn_ext"
    editable = "--editable " if origin.get("dir_info", {}).get("editable") else ""
    return editable + shlex.quote(unquote(location.path))


def _rebuild_command() -> str:
    return f"{shlex.quote(sys.executable)} -m pip install --force-reinstall --no-deps --no-cache-dir {_source()}"


def _directory() -> Path:
    """Where the library lies: beside this file, or, if this is a source tree, in the package installed from it."""
    package = sys.modules[__package__]
    for directory in [*package.__path__, *pkgutil.extend_path(list(package.__path__), package.__name__)]:
        if (Path(directory) / _LIBRARY).exists():
            if directory not in package.__path__:
                package.__path__.append(directory)  # _C lies there as well
            return Path(directory)
    build = f"{shlex.quote(sys.executable)} -m pip install {shlex.quote(str(Path(__file__).parents[1]))}"
    raise ImportError(
        f"flash_attn_ext is not built: neither '{Path(__file__).parent}' nor another flash_attn_ext on sys.path "
        f"holds {_LIBRARY}; build it with: {build}"
    )


def build_info() -> dict[str, str]:
    """version, torch (it was built for), cuda (of nvcc; "" = CPU only), archs, compiler, commit ("" = not from a clone)."""
    _directory()
    try:
        from . import _C
    except ImportError as error:
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise ImportError(
            f"flash_attn_ext was built for another Python than {python}; rebuild it with: {_rebuild_command()}"
        ) from error
    return _C.build_info()


def version() -> str:
    return build_info()["version"]


def cmake_prefix() -> str:
    """For CMAKE_PREFIX_PATH, so that a C++ project's find_package(flash_attn_ext) finds the library, header and torch."""
    return str(_directory())


def _minor(release: str) -> tuple[str, ...]:
    return tuple(release.split("+")[0].split(".")[:2])


def check_torch(running: str, built: str) -> None:
    """Raises ImportError if the torch that runs is not of the same minor release as the one of the build."""
    if _minor(running) != _minor(built):
        raise ImportError(
            f"flash_attn_ext was built for torch {built}, but torch {running} is running; rebuild it with: {_rebuild_command()}"
        )


def load() -> None:
    """Registers torch.ops.flash, once per process.

    Raises:
        ImportError: the library is not built, or was built for another torch or Python, or there is no torch; the text has the
            command that cures it.
    """
    info = build_info()  # says that nothing is built before torch takes its time
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        needed = f"{shlex.quote(sys.executable)} -m pip install 'torch=={'.'.join(_minor(info['torch']))}.*'"
        raise ModuleNotFoundError(
            f"flash_attn_ext was built for torch {info['torch']}, but there is no torch here; install it with: {needed}",
            name="torch",
        ) from error

    check_torch(str(torch.__version__), info["torch"])
    if not hasattr(torch.ops.flash, "attention"):  # registering the namespace a second time aborts the process
        torch.ops.load_library(_directory() / _LIBRARY)
