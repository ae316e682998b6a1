"""torch.export and ahead-of-time packages."""

from __future__ import annotations

import pytest
import torch

from cases import rows_first

attention = torch.ops.flash.attention


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Model(torch.nn.Module):
    def forward(self, query, key, value, mask):
        return attention(query, key, value, mask, enable_gqa=True)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool, device: str):
    """T4, T8: one dynamic program for lengths 1 to 1024, no divisibility guards; one node, before and after decomposition."""
    query, key, value = (x.detach() for x in rows_first(device, 40, 50))
    length, keys = torch.export.Dim("length", min=1, max=1024), torch.export.Dim("keys", min=1, max=1024)
    program = torch.export.export(
        Model(),
        (query, key, value, torch.randn(40, 50, device=device)),
        dynamic_shapes=({2: length}, {2: keys}, {2: keys}, {0: length, 1: keys}),
        strict=strict,
    )
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "flash.attention.default" in names
    decomposed = program.run_decompositions()
    names = {str(node.target) for node in decomposed.graph.nodes if node.op == "call_function"}
    assert "flash.attention_forward.default" in names and not any("softmax" in name for name in names)
    for rows, columns in ((1, 1), (33, 129), (1000, 3)):
        query, key, value = (x.detach() for x in rows_first(device, rows, columns))
        mask = torch.randn(rows, columns, device=device)
        expected = Model()(query, key, value, mask)
        assert torch.equal(program.module()(query, key, value, mask), expected)
        assert torch.equal(decomposed.module()(query, key, value, mask), expected)


def test_save_and_load_an_exported_program(device: str, tmp_path):
    query, key, value = (x.detach() for x in rows_first(device))
    mask = torch.randn(33, 33, device=device)
    program = torch.export.export(Model(), (query, key, value, mask))
    torch.export.save(program, tmp_path / "attention.pt2")
    loaded = torch.export.load(tmp_path / "attention.pt2")
    assert torch.equal(loaded.module()(query, key, value, mask), Model()(query, key, value, mask))


@pytest.mark.slow
def test_ahead_of_time_package(device: str, tmp_path):
    """AOTInductor calls the operator by name through its proxy executor."""
    if device != "cpu":
        pytest.skip("torch 2.11 ends the process inside aoti_load_package for CUDA models where this was tried (H200)")
    query, key, value = (x.detach() for x in rows_first(device))
    mask = torch.randn(33, 33, device=device)
    length = torch.export.Dim("length", min=2, max=512)
    program = torch.export.export(
        Model(), (query, key, value, mask), dynamic_shapes=({2: length}, {2: length}, {2: length}, {0: length, 1: length})
    )
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "attention.pt2"))
    model = torch._inductor.aoti_load_package(path)
    assert torch.equal(model(query, key, value, mask), Model()(query, key, value, mask))
