"""Few query rows per sequence against a long cache of keys and values: bytes of cache read per second, by graph replay.

Beside SDPA's own call, `ours`, stand attention_decode with lengths on the device (`ours-decode`) and with pages of 16 keys in random
order (`ours-page16`); sequences of very different lengths (`ours-ragged`) stand beside as many bytes in equal ones (`ours-equal`).
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import flash_attn_ext

from .. import rivals, runner
from ..cells import DTYPES, Cell
from ..timing import Call

DEFAULT_RIVALS = (rivals.OURS, "sdpa-flash", "sdpa-cudnn", "sdpa-efficient")
# batch, keys, heads, kv heads, head dim, from latency-bound to bandwidth-bound; then 4 query rows per sequence
SHAPES = (
    (1, 1024, 32, 8, 128),
    (1, 8192, 32, 8, 128),
    (32, 1024, 32, 8, 128),
    (1, 131072, 32, 8, 128),
    (8, 32768, 32, 8, 128),
    (64, 4096, 32, 8, 128),
    (128, 2048, 32, 32, 128),
    (16, 16384, 64, 8, 128),
    (4, 65536, 8, 1, 64),
    (8, 16384, 16, 2, 256),
)
ROWS_4 = ((1, 8192, 32, 8, 128), (8, 32768, 32, 8, 128))
RAGGED = (32, 32768, 32, 8, 128)  # lengths uniform in 100 ... 32768
PAGE = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], choices=list(DTYPES))
    parser.add_argument("--shrink", type=int, default=1, help="divides the batch and the number of keys, for a small machine")


def _graphed(call: Call) -> Call:
    """The call as a graph: what is measured is the kernels, as an inference server runs them."""
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with call.context(), torch.cuda.stream(side):
            for _ in range(3):
                call.function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with call.context(), torch.cuda.graph(graph):
            call.function()
    except Exception as error:
        return Call(call.function, refused=f"{type(error).__name__}: {error}"[:160])
    return Call(graph.replay)


def _cached(tensors: tuple[Tensor, ...], page: int | None, lengths: Tensor) -> Call:
    """attention_decode over the keys and values of a cell, in place or as pages in random order."""
    query, key, value = tensors[:3]
    if page is None:
        return Call(lambda: flash_attn_ext.attention_decode(query, key, value, lengths))
    batch, heads, keys, dim = key.shape
    blocks = keys // page
    table = torch.randperm(batch * blocks, device=key.device).view(batch, blocks).to(torch.int32)

    def pages(x: Tensor) -> Tensor:
        memory = torch.empty(batch * blocks, page, heads, dim, dtype=x.dtype, device=x.device)
        memory[table.flatten().long()] = x.transpose(1, 2).reshape(batch * blocks, page, heads, dim)
        return memory.transpose(1, 2)

    paged_key, paged_value = pages(key), pages(value)
    return Call(lambda: flash_attn_ext.attention_decode(query, paged_key, paged_value, lengths, block_table=table))


def _ragged(cell: Cell, args: argparse.Namespace, seconds: float) -> Iterator[dict[str, Any]]:
    tensors = cell.tensors(args.device, requires_grad=False)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(min(100, cell.keys), cell.keys + 1, (cell.batch,), generator=generator)
    equal = torch.full_like(lengths, int(lengths.sum()) // cell.batch)
    bytes_of_key = sum(tensor[0, :, 0].numel() * tensor.element_size() for tensor in tensors[1:3] if tensor is not None)
    calls, read = {}, {}
    for name, chosen in (("ours-ragged", lengths), ("ours-equal", equal)):
        calls[name] = _cached(tensors, None, chosen.to(torch.int32).to(args.device))
        read[name] = int(chosen.sum()) * bytes_of_key
    if args.device == "cuda":
        calls = {name: _graphed(call) for name, call in calls.items()}
    runner.time_calls(calls, args.device, args.rounds, seconds)
    for name, call in calls.items():

        def rate(seconds: float, read: int = read[name]) -> dict[str, Any]:
            return {"gigabytes_per_second": f"{read / seconds / 1e9:.1f}"}

        yield from runner.rows(cell, "forward", {name: call}, rate, difference="")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    chosen = runner.chosen(args, DEFAULT_RIVALS)

    def cell_of(dtype: str, rows: int, batch: int, keys: int, heads: int, kv_heads: int, head_dim: int) -> Cell:
        batch, keys = max(batch // args.shrink, 1), max(keys // args.shrink, PAGE)
        return Cell(dtype, batch, heads, kv_heads, rows, keys, head_dim, causal=False)

    todo = [
        cell_of(dtype, rows, *shape)
        for dtype in args.dtypes
        for rows, shapes in ((1, SHAPES), (4, ROWS_4), (1, (RAGGED,)))
        for shape in shapes
    ]
    last = len(todo) // len(args.dtypes) - 1
    for number, (cell, seconds) in enumerate(runner.walk(todo, args.budget)):
        if number % (last + 1) == last:
            yield from _ragged(cell, args, seconds)
            continue
        tensors = cell.tensors(args.device, requires_grad=False)
        eager = runner.forward_calls(chosen, tensors, cell)
        gap = runner.difference(eager, rivals.OURS) if rivals.OURS in eager else None
        if rivals.OURS in eager:
            full = torch.full((cell.batch,), cell.keys, dtype=torch.int32, device=args.device)
            eager["ours-decode"] = _cached(tensors, None, full)
            eager["ours-page16"] = _cached(tensors, PAGE, full)
        wrap: Callable[[Call], Call] = _graphed if args.device == "cuda" else lambda call: call
        calls = {name: wrap(call) for name, call in eager.items()}
        runner.time_calls(calls, args.device, args.rounds, seconds)
        read = sum(tensor.numel() * tensor.element_size() for tensor in tensors[1:3] if tensor is not None)

        def rate(seconds: float, read: int = read) -> dict[str, Any]:
            return {"gigabytes_per_second": f"{read / seconds / 1e9:.1f}"}

        yield from runner.rows(cell, "forward", calls, rate, difference="" if gap is None else f"{gap:.2e}")
        del tensors, eager, calls
