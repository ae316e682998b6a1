"""A test's body run by several processes that form one process group: gloo on the CPU, nccl with a GPU each."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable

import torch
from torch import distributed, multiprocessing


def run_ranks(body: Callable[..., None], world: int, *arguments: object, backend: str = "gloo") -> None:
    """Calls `body(rank, world, *arguments)` in `world` new processes; the first exception among them is raised here.

    The ranks meet in a file: a port found free could be taken before they bind it.
    """
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(enter, (world, backend, os.path.join(folder, "store"), body, arguments), nprocs=world)


def enter(rank: int, world: int, backend: str, store: str, body: Callable[..., None], arguments: tuple) -> None:
    if backend == "nccl":
        torch.cuda.set_device(rank)
    distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    body(rank, world, *arguments)
    distributed.destroy_process_group()
    # gloo's threads outlive the group as long as torch's device mesh refers to it. One that drops the tensors of its last
    # collective only after the interpreter began to end asks for the GIL, is cancelled and aborts the process: leave at once.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
