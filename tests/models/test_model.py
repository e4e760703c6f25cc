"""The decoder against numbers that transformers computed, and against itself: what a step holds changes no logit."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from minfer import attention
from minfer.models import model
from minfer.models.batch import batch
from minfer.models.batch import cache as new_cache
from minfer.models.model import Decoder, Scores
from minfer.models.rotary import Rotary
from tests.models import tiny
from tests.models.test_transformers import BOUNDS, EXPECTED


def last(decoder: Decoder, count: int = 40) -> torch.Tensor:
    return tiny.run(decoder, [tiny.prompt(count)], [[count]])[0][count - 1]


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_logits_are_those_that_transformers_computes(family):
    expected = torch.tensor(json.loads(EXPECTED.read_text())[family])
    assert tiny.error(last(tiny.decoder(family)), expected) <= BOUNDS[torch.float32]


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_a_step_of_single_tokens_and_chunks_gives_the_logits_of_whole_prompts(family):
    decoder = tiny.decoder(family)
    tokens = [tiny.prompt(40), tiny.prompt(33, 1)]
    steps = [[30, 0], [1, 20], [8, 1], [1, 12]]  # the last token alone, and the end of a chunk
    for sequence, found in zip(tokens, tiny.run(decoder, tokens, steps), strict=True):
        end = len(sequence) - 1
        assert tiny.error(found[end], tiny.run(decoder, [sequence], [[end + 1]])[0][end]) <= 1e-5


@pytest.mark.parametrize("page", [1, 8, 16, 128])
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.bfloat16), ("mistral", torch.bfloat16), ("gemma2", torch.float16)], ids=str
)
def test_kernels_of_half_types_see_the_same_keys_in_steps_of_one_token(family, dtype, page, monkeypatch):
    """With windows or without, and in pages of any power of two."""
    monkeypatch.delattr(model.plain, "attention")
    expected = torch.tensor(json.loads(EXPECTED.read_text())[family])
    found = tiny.run(tiny.decoder(family, dtype), [tiny.prompt(40)], [[37], [1], [1], [1]], page)[0]
    assert tiny.error(found[39], expected) <= BOUNDS[torch.bfloat16]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_half_types_are_near_what_transformers_computes(family, dtype):
    expected = torch.tensor(json.loads(EXPECTED.read_text())[family])
    for page in (16, 64):  # mla_decode takes pages of 64
        found = tiny.run(tiny.decoder(family, dtype), [tiny.prompt(40)], [[30], [1], [6], [1], [1], [1]], page)[0]
        assert tiny.error(found[39], expected) <= BOUNDS[torch.bfloat16]


@pytest.mark.parametrize(
    ("dims", "taken"),
    [
        ((96, 96), (96, 96)),  # Phi-3-mini
        ((192, 128), (192, 128)),  # DeepSeek-V2-Lite
        ((192, 192), (192, 192)),
        ((80, 80), (96, 96)),
        ((96, 24), (96, 96)),
        ((160, 100), (192, 128)),
        ((200, 40), (256, 256)),
        ((264, 264), None),
    ],
    ids=str,
)
def test_heads_of_prompts_are_padded_only_where_attention_does_not_take_them(dims, taken, monkeypatch):
    given = []

    def noted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: object) -> torch.Tensor:
        given.append((q.shape[-1], v.shape[-1]))
        return attention(q, k, v, **how)

    monkeypatch.setattr(model, "attention", noted)
    torch.manual_seed(0)
    (one, two), _ = tiny.place([tiny.prompt(12), tiny.prompt(3)], 16)
    one.piece(7)
    step = batch([one.piece(5), two.piece(3)], 16, "cpu")
    q, k, v = torch.randn(8, 4, dims[0]), torch.randn(15, 2, dims[0]), torch.randn(15, 2, dims[1])
    scores = Scores(0.2, softcap=5.0, window=4, sinks=torch.randn(4))
    halves = [x.bfloat16() for x in (q, k, v)]
    found = model.prefill(*halves, step, scores)
    assert given == ([taken] if taken else [])
    assert tiny.error(found, model.prefill(*(x.float() for x in halves), step, scores)) <= 1e-2
    assert len(given) == bool(taken), "attention takes no fp32"


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", {"head_dim": 96}),
        ("deepseek_v2", {"qk_nope_head_dim": 128, "v_head_dim": 128}),
    ],
)
def test_prompts_of_heads_that_only_attention_takes_are_near_those_in_fp32(family, sizes):
    """And decoding: by decode_attention for heads of 96, by mla_decode for latents in pages of 64."""
    tokens, steps = [tiny.prompt(40), tiny.prompt(30, 1)], [[20, 9], [1, 20], [19, 1]]
    wanted, found = (
        tiny.run(tiny.decoder(family, dtype, **sizes), tokens, steps, 64) for dtype in (torch.float32, torch.bfloat16)
    )
    for a, b in zip(found, wanted, strict=True):
        assert all(tiny.error(a[at], b[at]) <= BOUNDS[torch.bfloat16] for at in b)


def without(**other: object) -> object:
    return lambda decoder: dataclasses.replace(decoder, config=dataclasses.replace(decoder.config, **other))


def with_scores(**other: object) -> object:
    def change(decoder: Decoder) -> Decoder:
        for layer in decoder.layers:
            layer.attention.scores = dataclasses.replace(layer.attention.scores, **other)
        return decoder

    return change


def changed(part: str, **other: object) -> object:
    def change(decoder: Decoder) -> Decoder:
        for layer in decoder.layers:
            for name, value in other.items():
                if hasattr(getattr(layer, part), name):
                    setattr(getattr(layer, part), name, value)
        return decoder

    return change


PARTS = {
    "rope scaling of llama": ("llama", changed("attention", angles=Rotary(64, 5e5).tables(512, "cpu"))),
    "biases": ("qwen2", lambda decoder: [layer.attention.qkv.bias.zero_() for layer in decoder.layers] and decoder),
    "norms of q and k": ("qwen3", changed("attention", q_norm=None, k_norm=None)),
    "window": ("mistral", with_scores(window=0)),
    "cap of scores": ("gemma2", with_scores(softcap=0.0)),
    "scale of scores": ("gemma2", with_scores(scale=64**-0.5)),
    "cap of logits": ("gemma2", without(final_softcap=0.0)),
    "scale of the embedding": ("gemma2", without(embedding_scale=1.0)),
    "GeGLU": ("gemma2", changed("feed", activation="silu")),
    "the second norms": ("gemma2", lambda decoder: [setattr(each, "post_norms", None) for each in decoder.layers] and decoder),
    "linear rope": ("mixtral", changed("attention", angles=Rotary(64, 1e5).tables(512, "cpu"))),
    "weights of experts that sum to 1": ("qwen3_moe", changed("feed", normalize=False)),
    "shared experts": ("deepseek_v2", changed("feed", shared=None)),
    "the factor of experts": ("deepseek_v2", changed("feed", factor=1.0)),
    "YaRN's scale of scores": ("deepseek_v2", with_scores(scale=96**-0.5)),
    "sinks": ("gpt_oss", with_scores(sinks=None)),
    "the limit of experts": ("gpt_oss", changed("feed", limit=7.0)),
    "YaRN's amplitude": ("gpt_oss", changed("attention", angles=Rotary(64, 150000.0, "yarn", 8.0, 64).tables(512, "cpu"))),
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_the_expected_logits_show_each_part(part):
    """What a model would compute without one of its parts is farther away than any bound."""
    family, change = PARTS[part]
    expected = torch.tensor(json.loads(EXPECTED.read_text())[family])
    assert tiny.error(last(change(tiny.decoder(family))), expected) > 10 * BOUNDS[torch.float32]


def check_padding(model: Decoder, most: float) -> None:
    """Steps with single tokens and longer pieces, whose added tokens change no key and no logits."""
    sizes = set()
    for counts in ((1, 1, 1, 20, 9), (1, 1, 1, 31, 2), (1, 1, 1, 1, 12), (7,), (1, 1), (64,)):
        found, kept = [], []
        for pad in (False, True):
            sequences, pages = tiny.place([tiny.prompt(90, seed) for seed in range(len(counts))], 16)
            cache = new_cache(model.config, pages, 16, model.device, model.dtype)
            for each in sequences:
                model.forward(batch([each.piece(9)], 16, model.device), cache)
            pieces = [each.piece(count) for each, count in zip(sequences, counts, strict=True)]
            step = batch(pieces, 16, model.device, pad=pad)
            found.append(model.forward(step, cache)[: len(counts)])
            kept.append([x[:pages] for layer in cache for x in layer])
        sizes.add((len(step.ids), step.single, len(step.keys), len(step.of_q), len(step.last)))
        assert tiny.error(found[1], found[0]) <= most
        assert all(tiny.error(a, b) <= most for a, b in zip(*kept, strict=True))
    assert len(sizes) == 4  # the second step has the sizes of the first, and the last those of the fourth


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_a_padded_step_gives_the_same_logits_and_sizes_repeat(family):
    check_padding(tiny.decoder(family), 1e-5)


def test_a_batch_takes_single_tokens_first_and_pages_enough():
    one, two = tiny.place([[5] * 20, [6] * 20], 16)[0]
    with pytest.raises(ValueError, match="pieces of one token first"):
        tiny.batch([one.piece(3), two.piece(1)], 16, "cpu")
    one.pages = one.pages[:1]
    with pytest.raises(ValueError, match="a piece of 15 tokens from 3 does not fit 1 pages of 16"):
        tiny.batch([one.piece(15)], 16, "cpu")
