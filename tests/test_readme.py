"""The README's promises: its Python runs, and every cell of its support table is tried."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flash_attn_ext import attention, attention_decode, attention_varlen

README = (Path(__file__).parent.parent / "README.md").read_text()
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@pytest.mark.parametrize("snippet", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_python_in_the_readme_runs(snippet: str):
    if "transformers" in snippet:
        pytest.importorskip("transformers")
    exec(compile(snippet, "README.md", "exec"), {})


def test_cpp_in_the_readme_is_what_the_tested_program_does():
    """tests/cpp/consumer is built against the installed package and run by .ci/run."""
    folder = Path(__file__).parent / "cpp" / "consumer"
    program = (folder / "CMakeLists.txt").read_text() + (folder / "train.cpp").read_text()
    blocks = re.findall(r"```(?:cmake|cpp)\n(.*?)```", README, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line]
    assert len(lines) == 4
    for line in lines:
        text = re.sub(r"  #.*|\);$|^at::Tensor out = ", "", line).replace("(program ", "(train ")
        assert text in program, text


def read_table() -> tuple[list[str], dict[str, list[str]]]:
    text = re.search(r"<!-- support table: begin -->\n(.*?)<!-- support table: end -->", README, re.DOTALL)
    assert text, "the README has no support table"
    lines = [[cell.strip() for cell in line.strip("| \n").split("|")] for line in text[1].strip().splitlines()]
    header = [cell for cell in lines[0] if cell]
    return header, {row[0]: row[1:] for row in lines[2:]}


COLUMNS, ROWS = read_table()


class Inputs:
    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype, self.device = dtype, device
        self.accumulate = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(self, *shape: int, grad: bool = True) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype, requires_grad=grad)

    def qkv(self, head_dim: int = 32, value_dim: int | None = None, kv_heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
        shapes = (4, 33, head_dim), (kv_heads, 40, head_dim), (kv_heads, 40, value_dim or head_dim)
        return tuple(self.normal(2, *shape) for shape in shapes)

    def offsets(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def per_head(self, grad: bool) -> Tensor:
        return torch.rand(4, device=self.device, dtype=self.accumulate, requires_grad=grad)


def gradients(out: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    """Not None, finite and not all zero: a gradient that is quietly missing is no support."""
    found = torch.autograd.grad(out, leaves, torch.randn_like(out))
    assert all(bool(gradient.isfinite().all()) and bool(gradient.any()) for gradient in found)
    return found


def plain(inputs: Inputs) -> None:
    tensors = inputs.qkv()
    gradients(attention(*tensors), *tensors)


def head_dims(inputs: Inputs, *sizes: int) -> None:
    for size in sizes:
        tensors = inputs.qkv(size)
        gradients(attention(*tensors), *tensors)


def with_options(**options: object) -> Callable[[Inputs], None]:
    def run(inputs: Inputs) -> None:
        tensors = inputs.qkv()
        gradients(attention(*tensors, **options), *tensors)

    return run


def value_dim(inputs: Inputs) -> None:
    tensors = inputs.qkv(32, 56)
    out = attention(*tensors)
    assert out.shape[-1] == 56
    gradients(out, *tensors)


def grouped(inputs: Inputs) -> None:
    for kv_heads in (1, 2):
        tensors = inputs.qkv(kv_heads=kv_heads)
        assert [g.shape for g in gradients(attention(*tensors), *tensors)] == [t.shape for t in tensors]


def both_alignments(inputs: Inputs) -> None:
    tensors = inputs.qkv()
    results = [attention(*tensors, causal=causal) for causal in ("top_left", "bottom_right")]
    assert not torch.equal(*results)
    for out in results:
        gradients(out, *tensors)


def bool_mask(inputs: Inputs) -> None:
    tensors = inputs.qkv()
    gradients(attention(*tensors, torch.rand(33, 40, device=inputs.device) < 0.7), *tensors)


def float_mask(inputs: Inputs) -> None:
    tensors, mask = inputs.qkv(), inputs.normal(1, 4, 33, 40)
    assert gradients(attention(*tensors, mask), *tensors, mask)[-1].shape == mask.shape


def alibi(inputs: Inputs) -> None:
    tensors = inputs.qkv()
    gradients(attention(*tensors, alibi_slopes=inputs.per_head(grad=False)), *tensors)


def alibi_gradient(inputs: Inputs) -> None:
    slopes = inputs.per_head(grad=True)
    gradients(attention(*inputs.qkv(), alibi_slopes=slopes), slopes)


def sinks(inputs: Inputs) -> None:
    tensors, logits = inputs.qkv(), inputs.per_head(grad=True)
    gradients(attention(*tensors, sinks=logits), *tensors, logits)


def lse(inputs: Inputs) -> None:
    query, key, value = inputs.qkv()
    gradients(attention(query, key, value, return_lse=True)[1], query, key)


def packed(inputs: Inputs) -> None:
    tensors = tuple(inputs.normal(12, 4, 32) for _ in range(3))
    offsets = inputs.offsets(0, 5, 12)
    gradients(attention_varlen(*tensors, offsets, offsets, 7, 7, causal=True), *tensors)


def cached(inputs: Inputs) -> None:
    cache = inputs.normal(2, 2, 40, 32, grad=False)
    pages = cache.view(2, 2, 5, 8, 32).transpose(1, 2).flatten(0, 1)
    query, lengths = inputs.normal(2, 4, 3, 32, grad=False), inputs.offsets(40, 7)
    table = inputs.offsets(*range(10)).view(2, 5)
    outs = [attention_decode(query, x, x, lengths, block_table=t, causal=True) for x, t in ((cache, None), (pages, table))]
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(outs[0][:1], attention(query[:1], cache[:1], cache[:1], causal="bottom_right"))


def deterministic(inputs: Inputs) -> None:
    tensors = inputs.qkv(kv_heads=1)
    grad = torch.randn(2, 4, 33, 32, device=inputs.device, dtype=inputs.dtype)
    runs = [torch.autograd.grad(attention(*tensors, deterministic=True), tensors, grad) for _ in range(5)]
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))


def second_derivative(inputs: Inputs) -> None:
    tensors = inputs.qkv()
    (first,) = torch.autograd.grad(attention(*tensors).square().sum(), tensors[0], create_graph=True)
    gradients(first, *tensors)


def vmap(inputs: Inputs) -> None:
    tensors = inputs.qkv()
    torch.testing.assert_close(torch.func.vmap(attention)(*tensors), attention(*tensors))


def forward_mode(inputs: Inputs) -> None:
    tensors = tuple(tensor.detach() for tensor in inputs.qkv())
    torch.func.jvp(attention, tensors, tensors)


FEATURES: dict[str, Callable[[Inputs], None]] = {
    "forward and backward": plain,
    "head dim 1 to 256": lambda inputs: head_dims(inputs, 1, 40, 64, 100, 128, 256),
    "head dim 257 to 512": lambda inputs: head_dims(inputs, 257, 512),
    "value dim other than head dim": value_dim,
    "grouped heads (GQA, MQA)": grouped,
    "causal, both alignments": both_alignments,
    "window": with_options(window=(5, 3)),
    "bool mask": bool_mask,
    "float mask, with gradient": float_mask,
    "softcap": with_options(softcap=5.0),
    "ALiBi": alibi,
    "sinks, with gradient": sinks,
    "dropout": with_options(dropout_p=0.2),
    "lse, with gradient": lse,
    "cached keys and values, paged too": cached,
    "packed sequences": packed,
    "deterministic backward": deterministic,
    "second derivative": second_derivative,
    "vmap": vmap,
    "forward-mode derivative": forward_mode,
    "gradient of ALiBi slopes": alibi_gradient,
}


def test_table_and_features_name_the_same_rows():
    assert list(ROWS) == list(FEATURES)
    assert all(len(cells) == len(COLUMNS) and set(cells) <= {"yes", "no"} for cells in ROWS.values())


@pytest.mark.parametrize("feature", list(FEATURES))
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_support_table(feature: str, dtype: str, device: str):
    promised = ROWS[feature][COLUMNS.index(f"{device.upper()} {dtype}")]
    run = FEATURES[feature]
    inputs = Inputs(DTYPES[dtype], device)
    if promised == "yes":
        run(inputs)
    else:
        with pytest.raises((RuntimeError, NotImplementedError)):
            run(inputs)
