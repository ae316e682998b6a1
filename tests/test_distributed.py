"""Training over two processes, on the CPU or with a GPU each: data parallel (DDP) and sharded (FSDP2), as on one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_attn_ext import attention
from ranks import run_ranks

STEPS = 3


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out, self.norm = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.LayerNorm(width)
        self.sinks = nn.Parameter(torch.randn(heads))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = attention(query, key, value, causal=True, window=(6, 0), sinks=self.sinks, softcap=5.0)
        return x + self.out(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def train(model: nn.Module, batch: Tensor, autocast: bool) -> list[float]:
    """Losses of a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=autocast):
            loss = model(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def worker(rank: int, world: int, kind: str, autocast: bool, device: str, rows: int, width: int) -> None:
    from torch.distributed import all_reduce
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model, batch = Model(width).to(device), torch.randn(2 * world, rows, width).to(device)
    alone = copy.deepcopy(model)
    expected = train(alone, batch, autocast)
    mesh = init_device_mesh(device, (world,))
    if kind == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=0.1)  # reduced while backward still runs
    else:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    losses = torch.tensor(train(model, batch.chunk(world)[rank], autocast), device=device)
    all_reduce(losses)
    tolerance = 1e-2 if autocast else 1e-5
    torch.testing.assert_close(losses / world, torch.tensor(expected, device=device), rtol=tolerance, atol=tolerance)
    for (name, parameter), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        torch.testing.assert_close(whole, other, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_training(kind: str, autocast: bool):
    run_ranks(worker, 2, kind, autocast, "cpu", 11, 32)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_training_with_a_gpu_each(kind: str, cuda: str):
    """Head dim 64 and bf16, so that a persistent kernel shares the GPU with NCCL's."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run_ranks(worker, 2, kind, True, "cuda", 2000, 256, backend="nccl")
