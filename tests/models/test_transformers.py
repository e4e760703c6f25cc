"""The decoder computes what transformers computes, in each family. It takes seconds to import, so that all is slow here;
`test_model.py` compares with numbers that one of these tests has checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from minfer.models import weights
from tests.models import tiny

pytestmark = pytest.mark.slow
EXPECTED = Path(__file__).parent / "expected.json"
# The largest relative error of a row of logits: fp32 against fp32, and bf16 against fp32 with the same weights.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def reference(folder: Path):
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install --group test")
    transformers.utils.logging.disable_progress_bar()
    # eager is the only implementation that has sinks and caps
    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **how).eval()


@torch.no_grad()
def logits_of(model, tokens: list[int]) -> torch.Tensor:
    """Of every position, (tokens, vocab), computed at once and without a cache."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_every_way_through_the_cache_gives_the_logits_of_transformers(family, dtype, tmp_path):
    """Whole prompts, chunks, single tokens, all of them in one step; lengths that differ and shuffled pages."""
    # In bf16, rounding may send a token to another expert, which changes logits by several per cent: not with these.
    most = 0.1 if dtype == torch.float32 else 0.09 if family == "qwen3_moe" else 0.08
    folder = tiny.checkpoint(family, tmp_path / family, most)
    model, decoder = reference(folder), weights.load(folder, "cpu", dtype)
    tokens = [tiny.prompt(70, 1), tiny.prompt(41, 2), tiny.prompt(5, 3)]
    steps = [[30, 0, 0], [1, 20, 0], [20, 1, 2], [1, 5, 1], [7, 13, 1], [1, 1, 1], [10, 1, 0]]
    for page in (64, 16):
        errors = []
        for sequence, found in zip(tokens, tiny.run(decoder, tokens, steps, page), strict=True):
            wanted = logits_of(model, sequence)
            errors += [tiny.error(row, wanted[position]) for position, row in found.items()]
        assert all(error <= BOUNDS[dtype] for error in errors)  # max() would overlook NaN


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_greedy_tokens_are_those_of_transformers(family, tmp_path):
    # With smaller weights, or an embedding that is also the head, a model repeats a few tokens.
    folder, count = tiny.checkpoint(family, tmp_path / family, most=0.4, tie_word_embeddings=False), 256
    tokens = tiny.prompt(30, 5)
    model, decoder = reference(folder), weights.load(folder, "cpu", torch.float32)
    (sequence,), pages = tiny.place([tokens + [0] * count], 16)
    cache = tiny.new_cache(decoder.config, pages, 16, "cpu", torch.float32)
    given = 30
    for _ in range(count):
        logits = decoder.forward(tiny.batch([sequence.piece(given)], 16, "cpu"), cache)
        sequence.tokens[sequence.done] = int(logits[0].argmax()) if sequence.done < 30 + count else 0
        given = 1
    wanted = model.generate(
        torch.tensor([tokens]), max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    assert sequence.tokens == wanted[0].tolist()
    assert len(set(sequence.tokens[30:])) > 10, "so few different tokens would prove little"


def test_the_expected_logits_of_the_fast_tier_are_those_of_transformers(tmp_path):
    """MINFER_WRITE_EXPECTED=1 in the environment writes them."""
    import os

    made = {}
    for family in tiny.CONFIGS:
        logits = logits_of(reference(tiny.checkpoint(family, tmp_path / family)), tiny.prompt(40))[-1]
        made[family] = [round(value, 6) for value in logits.tolist()]
    if os.environ.get("MINFER_WRITE_EXPECTED") == "1":
        EXPECTED.write_text(json.dumps(made, indent=None, separators=(",", ":")).replace("],", "],\n") + "\n")
    expected = json.loads(EXPECTED.read_text())
    assert expected.keys() == made.keys()
    for family, logits in made.items():
        assert tiny.error(torch.tensor(expected[family]), torch.tensor(logits)) <= 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "deepseek_v2", "gpt_oss"])
def test_what_transformers_saves_in_shards_is_loaded(family, tmp_path):
    model = reference(tiny.checkpoint(family, tmp_path / "first"))
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()
    first, second = (weights.load(tmp_path / name, "cpu", torch.float32) for name in ("first", "sharded"))
    tokens = [tiny.prompt(20)]
    assert torch.equal(tiny.run(first, tokens, [[20]])[0][19], tiny.run(second, tokens, [[20]])[0][19])
