"""attn_implementation="flash_attn_ext": tiny random models of transformers beside their eager attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="4.56")
flash = pytest.importorskip("flash_attn_ext.integrations.transformers")

VOCABULARY = 99
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256, "attention_dropout": 0.0, "initializer_range": 0.4,
}  # fmt: skip


def llama():
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES, num_key_value_heads=2, pad_token_id=0)


def gemma2():
    """Softcap, sliding windows in every second layer."""
    return transformers.Gemma2ForCausalLM, transformers.Gemma2Config(
        **SIZES, num_key_value_heads=2, head_dim=16, sliding_window=9, attn_logit_softcapping=3.0, query_pre_attn_scalar=16
    )


def gpt_oss():
    """Sinks, sliding windows."""
    return transformers.GptOssForCausalLM, transformers.GptOssConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=9,
        num_local_experts=2,
        num_experts_per_tok=1,
        pad_token_id=0,
    )


CAUSAL = [llama, gemma2, gpt_oss]


def pair(make, device: str) -> tuple:
    """The same weights with eager attention and with ours."""
    models = []
    for implementation in ("eager", "flash_attn_ext"):
        torch.manual_seed(0)
        kind, config = make()
        config._attn_implementation = implementation
        model = kind(config).to(device).eval()
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                torch.nn.init.normal_(parameter)
        models.append(model)
    assert models[1].config._attn_implementation == "flash_attn_ext"
    return tuple(models)


def tokens(batch: int, length: int, device: str) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1)).to(device)


def padding(batch: int, length: int, side: str, device: str) -> Tensor:
    mask = torch.ones(batch, length, dtype=torch.long)
    for b in range(1, batch):
        (mask[b, : 3 * b] if side == "left" else mask[b, length - 3 * b :]).zero_()
    return mask.to(device)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3 * float(theirs.detach().abs().max()))


@pytest.mark.parametrize("make", CAUSAL)
def test_whole_sequences(make, device: str):
    eager, ours = pair(make, device)
    ids = tokens(2, 40, device)
    with torch.no_grad():
        close(ours(ids).logits, eager(ids).logits)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("length", [12, 40])
@pytest.mark.parametrize("make", CAUSAL)
def test_padded_batches(make, length: int, side: str, device: str):
    eager, ours = pair(make, device)
    ids, mask = tokens(3, length, device), padding(3, length, side, device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        results = [model(ids, attention_mask=mask, position_ids=positions).logits for model in (ours, eager)]
    close(results[0][mask.bool()], results[1][mask.bool()])


@pytest.mark.parametrize("how", ["positions", "lengths"])
@pytest.mark.parametrize("make", CAUSAL)
def test_packed_sequences(make, how: str, device: str):
    """Several sequences in one row do not see each other; both ways to say where they end."""
    eager, ours = pair(make, device)
    lengths = (7, 20, 13)
    ids = tokens(1, sum(lengths), device)
    options = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None].to(device)}
    if how == "lengths":
        cu = torch.tensor([0, 7, 27, 40], dtype=torch.int32, device=device)
        options |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 20, "max_length_k": 20}
    with torch.no_grad():
        packed = ours(ids, use_cache=False, **options).logits[0]
        alone = torch.cat([eager(part, use_cache=False).logits[0] for part in ids.split(lengths, 1)])
    close(packed, alone)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("make", CAUSAL)
def test_generate(make, side: str | None, cache: str, device: str):
    """Greedy text of a padded batch, longer than the windows, token by token the same."""
    eager, ours = pair(make, device)
    ids = tokens(3, 14, device)
    mask = torch.ones_like(ids) if side is None else padding(3, 14, side, device)
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    with torch.no_grad():
        torch.testing.assert_close(ours.generate(ids, **options), eager.generate(ids, **options))


@pytest.mark.parametrize("make", CAUSAL)
def test_training(make, device: str):
    """Gradients of a padded batch, sinks included."""
    eager, ours = pair(make, device)
    ids, mask = tokens(2, 33, device), padding(2, 33, "right", device)
    labels = ids.masked_fill(mask == 0, -100)
    for model in (eager, ours):
        model.train()
        model(ids, attention_mask=mask, labels=labels).loss.backward()
    for (name, ours_parameter), theirs in zip(ours.named_parameters(), eager.parameters(), strict=True):
        if theirs.grad is None:
            continue
        scale = float(theirs.grad.abs().max())
        assert (ours_parameter.grad - theirs.grad).abs().max() <= 5e-3 * scale + 1e-6, name


@pytest.mark.parametrize("make", CAUSAL[:2])
def test_compiled(make, device: str):
    """One graph, also for a row that may hold several sequences, which only the values of its positions tell."""
    _, model = pair(make, device)
    packed = torch.cat([torch.arange(n) for n in (8, 13)])[None].to(device)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for batch, positions in ((2, None), (1, None), (1, packed)):
        text = tokens(batch, 21, device)
        results = [m(text, position_ids=positions, use_cache=False).logits for m in (compiled, model)]
        close(*results)
        found, expected = (
            torch.autograd.grad(logits.square().mean(), model.parameters(), allow_unused=True) for logits in results
        )
        for ours, theirs in zip(found, expected, strict=True):
            close(ours, theirs)


@pytest.mark.parametrize("length", [12, 40])
def test_bidirectional(length: int, device: str):
    def bert():
        return transformers.BertModel, transformers.BertConfig(
            **{**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0}
        )

    eager, ours = pair(bert, device)
    ids, mask = tokens(3, length, device), padding(3, length, "right", device)
    with torch.no_grad():
        close(ours(ids).last_hidden_state, eager(ids).last_hidden_state)
        results = [model(ids, attention_mask=mask).last_hidden_state for model in (ours, eager)]
    close(results[0][mask.bool()], results[1][mask.bool()])


@pytest.mark.parametrize("make", CAUSAL)
def test_four_dimensional_masks(make, device: str):
    """A mask that the caller made is taken as it is: in layers with a sliding window too, as eager attention does it."""
    eager, ours = pair(make, device)
    ids = tokens(2, 20, device)
    allowed = torch.ones(20, 20, dtype=torch.bool, device=device).tril()
    allowed[:, 3:6] = torch.eye(20, dtype=torch.bool, device=device)[:, 3:6]
    with torch.no_grad():
        mask = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)[None, None].expand(2, 1, -1, -1)
        close(ours(ids, attention_mask=mask).logits, eager(ids, attention_mask=mask).logits)


def test_sequences_packed_in_several_rows(device: str):
    eager, ours = pair(gemma2, device)
    ids = tokens(2, 20, device)
    positions = torch.stack([torch.arange(20), torch.cat([torch.arange(7), torch.arange(13)])]).to(device)
    results = [model(ids, position_ids=positions, use_cache=False).logits for model in (eager, ours)]
    close(*results)


def test_images_see_both_ways(device: str):
    """Gemma 3's tokens of one image see each other, in layers with a sliding window too."""

    def gemma3():
        text = {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 9, "pad_token_id": 0}
        vision = {
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "image_size": 32,
        }
        return transformers.Gemma3ForConditionalGeneration, transformers.Gemma3Config(
            text_config={**text, "layer_types": ["sliding_attention", "full_attention"]},
            vision_config={**vision, "patch_size": 8, "vision_use_head": False},
            mm_tokens_per_image=4, image_token_index=90, boi_token_index=91, eoi_token_index=92,
        )  # fmt: skip

    eager, ours = pair(gemma3, device)
    ids = tokens(2, 20, device) % 90
    ids[:, 3:7] = 90
    images = {"pixel_values": torch.randn(2, 3, 32, 32, device=device), "token_type_ids": (ids == 90).long()}
    with torch.no_grad():
        for mask in (torch.ones_like(ids), padding(2, 20, "left", device)):
            results = [model(ids, attention_mask=mask, **images).logits for model in (ours, eager)]
            close(*(result[mask.bool()] for result in results))


def test_the_model_calls_it(device: str):
    _, ours = pair(llama, device)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ours(tokens(1, 5, device))
    assert "flash::attention_forward" in {event.name for event in profile.events()}


def test_switching_and_unknown_arguments(device: str):
    _, ours = pair(llama, device)
    ours.set_attn_implementation("eager")
    ours.set_attn_implementation("flash_attn_ext")
    assert ours.config._attn_implementation == "flash_attn_ext"
    x = torch.zeros(1, 2, 4, 8, device=device)
    with pytest.raises(NotImplementedError, match="position_bias"):
        flash.attention(torch.nn.Identity(), x, x, x, None, position_bias=x)


def test_continuous_batching_step(device: str):
    """One row of each sequence, appended to its pages and attending to them."""
    k_cache, v_cache = (torch.randn(6, 4, 2, 16, device=device) for _ in range(2))
    table = torch.tensor([[5, 2], [0, 3]], dtype=torch.int32, device=device)
    query, key, value = (torch.randn(1, heads, 2, 16, device=device) for heads in (4, 2, 2))
    cu = torch.tensor([0, 6, 9], dtype=torch.int32, device=device)  # new keys included
    out, _ = flash.attention(
        torch.nn.Identity(), query, key, value, None, is_causal=True, block_table=table, k_cache=k_cache, v_cache=v_cache,
        cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=1, max_length_k=6,
    )  # fmt: skip
    for b, length in enumerate((6, 3)):
        keys, values = (x[table[b].long()].flatten(0, 1)[:length].transpose(0, 1)[None] for x in (k_cache, v_cache))
        torch.testing.assert_close(keys[0, :, -1], key[0, :, b])
        true = torch.nn.functional.scaled_dot_product_attention(query[:, :, b : b + 1], keys, values, enable_gqa=True)
        torch.testing.assert_close(out[:, b], true[:, :, 0])


@pytest.mark.parametrize("side", ["left", "right"])
def test_compiled_padded_batches(side: str, device: str):
    """Padding is cut out inside a graph as well; transformers itself reads the mask before the layers, which is one break."""
    _, model = pair(llama, device)
    mask, text = padding(3, 40, side, device), tokens(3, 40, device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    compiled = torch.compile(model, backend="aot_eager")
    results = [m(text, attention_mask=mask, position_ids=positions).logits[mask.bool()] for m in (compiled, model)]
    close(*results)
    gradients = [torch.autograd.grad(logits.square().mean(), tuple(model.parameters())) for logits in results]
    for ours, theirs in zip(*gradients, strict=True):
        close(ours, theirs)
    layer, query = torch.nn.Identity(), torch.randn(3, 4, 40, 16, device=device)
    whole = torch.compile(flash.attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(whole(layer, query, query, query, mask)[0], flash.attention(layer, query, query, query, mask)[0])


@pytest.mark.parametrize("lengths", [(12,), (5, 7)])
def test_operators_of_compiled_rows(lengths: tuple[int, ...], device: str):
    """Contracts of the operators that read positions inside a graph, and what they do with dropout and sinks."""
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
    operators = torch.ops.flash_attn_ext
    torch.library.opcheck(operators.sequence_ends.default, (positions,))
    query = torch.randn(1, 2, 12, 8, device=device, requires_grad=True)
    sinks = torch.randn(2, device=device, requires_grad=True)
    row = operators.sequence_ends(positions)
    torch.library.opcheck(operators.attention_of_row.default, (query, query, query, *row, sinks, None, 3, None, 5.0, 0.0))
    layer = torch.nn.Identity()

    def call(query: Tensor, sinks: Tensor) -> Tensor:
        return flash.attention(
            layer, query, query, query, None, dropout=0.3, sliding_window=4, s_aux=sinks, position_ids=positions
        )[0]

    results = []
    for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(0)
        out = function(query, sinks)
        results += [(out, *torch.autograd.grad(out.square().sum(), (query, sinks)))]
    for ours, theirs in zip(*results, strict=True):
        close(ours, theirs)
