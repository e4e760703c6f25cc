"""The `config.json` of some published models, with the fields that affect speed, so that they can run with random weights."""

from __future__ import annotations

from typing import Any

from minfer.models.config import Config, ConfigError
from minfer.models.families import parse


def _sizes(
    hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int | None, ffn: int, vocab: int, longest: int
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": longest,
    }


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


NAMED: dict[str, dict[str, Any]] = {
    # no published model: it runs anywhere in a second, and has one token for each byte
    "tiny": {"model_type": "llama", **_sizes(64, 2, 4, 2, 64, 128, 256, 2048)},
    "llama-3.2-1b": {
        "model_type": "llama",
        **_sizes(2048, 16, 32, 8, 64, 8192, 128256, 131072),
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": _llama3(32.0),
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        **_sizes(4096, 32, 32, 8, 128, 14336, 128256, 131072),
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": _llama3(8.0),
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        **_sizes(1024, 28, 16, 8, 128, 3072, 151936, 40960),
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {"model_type": "qwen3", **_sizes(4096, 36, 32, 8, 128, 12288, 151936, 40960), "rope_theta": 1e6},
    "mistral-7b-v0.1": {
        "model_type": "mistral",
        **_sizes(4096, 32, 32, 8, 128, 14336, 32000, 32768),
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
    },
    "gemma-2-2b": {
        "model_type": "gemma2",
        **_sizes(2304, 26, 8, 4, 256, 9216, 256000, 8192),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        **_sizes(4096, 32, 32, 8, 128, 14336, 32000, 32768),
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        **_sizes(2048, 48, 32, 4, 128, 6144, 151936, 40960),
        "rope_theta": 1e6,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        **_sizes(2048, 27, 16, 16, None, 10944, 102400, 163840),
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        **_sizes(2880, 24, 64, 8, 64, 2880, 201088, 131072),
        "rms_norm_eps": 1e-5,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
}


def named(name: str) -> Config:
    """The config of this name. Raises ConfigError if there is none."""
    if name not in NAMED:
        raise ConfigError(f"there is no config named {name!r}; there are {', '.join(NAMED)}")
    return parse(NAMED[name], name)
