"""Small checkpoints of each family, with weights that are the same on every machine, and sequences to run on them."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from minfer.models import families, weights
from minfer.models.batch import Piece, batch
from minfer.models.batch import cache as new_cache
from minfer.models.model import Decoder

VOCAB = 97
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 64}
FEW = {"num_experts_per_tok": 2, "num_local_experts": 4}
# What a config.json has of each family, but for COMMON: partly as transformers 5 writes it, partly as it was before.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 64, "rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "qwen2": {"tie_word_embeddings": True, "rope_theta": 1e6, "use_sliding_window": False, "sliding_window": 32},
    "qwen3": {
        "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "mistral": {"head_dim": 64, "sliding_window": 20, "rope_theta": 10000.0},
    "gemma2": {
        "head_dim": 64,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": 20,
        "query_pre_attn_scalar": 48,
        "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 2.0,
        "tie_word_embeddings": True,
    },
    "mixtral": {**FEW, "head_dim": 64, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0}},
    "qwen3_moe": {
        "head_dim": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    },
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 24,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "topk_method": "greedy",
        "rope_scaling": {"type": "yarn", "mscale": 0.7, "mscale_all_dim": 0.7, **YARN},
    },
    "gpt_oss": {
        **FEW,
        "head_dim": 64,
        "sliding_window": 20,
        "swiglu_limit": 1.0,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "truncate": False, **YARN},
    },
}


def config_of(family: str, **other: Any) -> dict[str, Any]:
    return {**COMMON, **CONFIGS[family], "model_type": family, **other}


class Hashed:
    """Weights from a tensor's name and places, exact in bfloat16: matrices in -most to most; norms, biases and sinks
    within 0.2 of what they are before training, so that each of them matters."""

    def __init__(self, config: dict[str, Any], most: float = 0.1) -> None:
        self.config, self.most, self.made = config, most, dict[str, torch.Tensor]()

    def fill(self, name: str, out: torch.Tensor) -> None:
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6])
        x = torch.arange(number, number + out.numel())
        for _ in range(2):
            x = (x * 2654435761 % 2**32) ^ (x >> 15)
        flat = (x % 2**16).float() / 2**15 - 1
        centre = 1.0 if "norm" in name and self.config["model_type"] != "gemma2" else 0.0
        flat = flat * self.most if out.dim() > 1 and not name.endswith("bias") else flat * 0.2 + centre
        self.made[name] = flat.view(out.shape).bfloat16()
        out.copy_(self.made[name])

    def has(self, name: str) -> bool:
        return not name.endswith(("_blocks", "_scales"))

    def packed(self, name: str, rows: int, columns: int) -> None:
        return None

    def finish(self) -> None:
        pass


def decoder(family: str, dtype: torch.dtype = torch.float32, most: float = 0.1, **other: Any) -> Decoder:
    config = config_of(family, **other)
    return weights.build(families.parse(config), Hashed(config, most), "cpu", dtype)


def checkpoint(family: str, folder: Path, most: float = 0.1, **other: Any) -> Path:
    """A folder with config.json and model.safetensors, in bfloat16."""
    from safetensors.torch import save_file

    config = config_of(family, **other)
    source = Hashed(config, most)
    weights.build(families.parse(config), source)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(source.made, folder / "model.safetensors", {"format": "pt"})
    return folder


def prompt(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(2, VOCAB), k=count)


class Placed:
    """A sequence, its pages, and how much of it was given to the model."""

    def __init__(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        self.tokens, self.pages, self.done = tokens, pages, 0

    def piece(self, count: int) -> Piece:
        start, self.done = self.done, self.done + count
        return Piece(self.tokens[start : self.done], start, self.pages)


def place(tokens: Sequence[Sequence[int]], page: int, seed: int = 1) -> tuple[list[Placed], int]:
    """Sequences whose pages are shuffled among each other, and how many pages there are."""
    counts = [-(-len(each) // page) for each in tokens]
    pages = list(range(sum(counts) + 3))
    random.Random(seed).shuffle(pages)
    taken = iter(pages)
    return [Placed(each, [next(taken) for _ in range(n)]) for each, n in zip(tokens, counts, strict=True)], len(pages)


def run(
    decoder: Decoder, tokens: Sequence[Sequence[int]], steps: Sequence[Sequence[int]], page: int = 16
) -> list[dict[int, torch.Tensor]]:
    """Run steps, each of which says how many tokens of each sequence it takes. For each sequence: the logits at the position of
    each piece's last token."""
    sequences, pages = place(tokens, page)
    cache = new_cache(decoder.config, pages, page, decoder.device, decoder.dtype)
    found: list[dict[int, torch.Tensor]] = [{} for _ in tokens]
    for step in steps:
        chosen = sorted((i for i, count in enumerate(step) if count), key=lambda i: step[i] > 1)
        pieces = [sequences[i].piece(step[i]) for i in chosen]
        logits = decoder.forward(batch(pieces, page, decoder.device), cache)
        for i, row in zip(chosen, logits, strict=True):
            found[i][sequences[i].done - 1] = row
    return found


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference over that of what is wanted."""
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())
