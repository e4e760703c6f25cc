"""Reads the `config.json` of a checkpoint, for the families of models in `FAMILIES`. A field that would change the result and
is not supported raises an error that names the field."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from minfer.models.config import Config, ConfigError, Experts, Latent
from minfer.models.rotary import Rotary, growth

# Fields that change no logit: they are for training, for other programs, or for the text.
IGNORED = frozenset(
    [
        "architectures",
        "attention_dropout",
        "auto_map",
        "aux_loss_alpha",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "embd_pdrop",
        "ep_size",
        "experts_per_token",
        "hidden_dropout",
        "id2label",
        "initial_context_length",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "max_window_layers",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "resid_pdrop",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "seq_aux",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    ]
)


class Fields:
    """The fields of a config. `refuse_others` raises an error if there is one that nothing has taken."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where, self.taken = values, where, set[str]()

    def take(self, name: str, default: Any = None) -> Any:
        """The value of a field, or the default where it is missing or null."""
        self.taken.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def need(self, name: str) -> Any:
        value = self.take(name)
        if value is None:
            raise ConfigError(f"{self.where} lacks the field {name}, which minfer needs")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        value = self.need(name) if default is None else self.take(name, default)
        if type(value) is not int or value < 1:
            raise ConfigError(f"{self.where} has {name}={value!r}, which must be an int from 1")
        return value

    def only(self, name: str, *accepted: Any) -> None:
        """Refuse a field with another value than these; null counts as missing."""
        value = self.take(name)
        if value is not None and value not in accepted:
            known = " or ".join(map(repr, accepted)) if accepted else "null"
            raise ConfigError(f"{self.where} has {name}={value!r}, which is not supported: it takes {known}")

    def refuse_others(self) -> None:
        for name, value in self.values.items():
            if name in self.taken or name in IGNORED or name.startswith("_") or value is None or value is False:
                continue
            raise ConfigError(
                f"{self.where} has the field {name}={value!r}, which minfer does not know and which may change the result"
            )


SCALINGS: dict[str, dict[str, str]] = {  # the fields of each kind of rope, by Rotary's names
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_max_position_embeddings": "original",
        "low_freq_factor": "low",
        "high_freq_factor": "high",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original",
        "beta_fast": "fast",
        "beta_slow": "slow",
        "truncate": "truncate",
    },
}


def rotary(f: Fields, dim: int, interleaved: bool = False) -> tuple[Rotary, float]:
    """The rotation of heads, and the factor by which YaRN multiplies the scale of scores. transformers 5 writes
    `rope_parameters`; earlier versions write `rope_theta` and `rope_scaling`."""
    theta, old, new = f.take("rope_theta", 10000.0), f.take("rope_scaling", {}), f.take("rope_parameters", {})
    f.only("partial_rotary_factor", 1.0)
    given = {**old, **new}
    kinds = given.pop("rope_type", None), given.pop("type", None)
    kind = kinds[0] or kinds[1] or "default"
    if kind not in SCALINGS:
        raise ConfigError(
            f"{f.where} has rope_type={kind!r}, which is not supported: it takes {' or '.join(map(repr, SCALINGS))}"
        )
    made: dict[str, Any] = {"theta": float(given.pop("rope_theta", theta))}
    for name, field in SCALINGS[kind].items():
        value = given.pop(name, None)
        if value is not None:
            made[field] = value
        elif field in ("factor", "low", "high"):
            raise ConfigError(f"{f.where} lacks {name} for its rope_type {kind!r}")
    squared = 1.0
    if kind in ("llama3", "yarn"):
        made.setdefault("original", f.need("max_position_embeddings"))
    if kind == "yarn":
        one, every = given.pop("mscale", None), given.pop("mscale_all_dim", None)
        amplitude = given.pop("attention_factor", None)
        if amplitude is None:
            amplitude = growth(made["factor"])
            if one and every:
                amplitude = growth(made["factor"], one) / growth(made["factor"], every)
        made["amplitude"] = amplitude
        squared = growth(made["factor"], every) ** 2 if every else 1.0
    for name, value in given.items():
        if value not in (None, False) and (name, value) != ("partial_rotary_factor", 1.0):
            raise ConfigError(f"{f.where} has {name}={value!r} for rope_type {kind!r}, which is not supported")
    return Rotary(dim, kind=kind, interleaved=interleaved, **made), squared


def common(f: Fields) -> dict[str, Any]:
    """The values that all families have."""
    hidden, heads = f.size("hidden_size"), f.size("num_attention_heads")
    kv_heads, layers = f.size("num_key_value_heads", heads), f.size("num_hidden_layers")
    if f.take("head_dim") is None and hidden % heads:
        raise ConfigError(f"{f.where} has hidden_size={hidden}, which num_attention_heads={heads} does not divide")
    if heads % kv_heads:
        raise ConfigError(f"{f.where} has num_key_value_heads={kv_heads}, which does not divide {heads} heads")
    stop, biased = f.take("eos_token_id", ()), bool(f.take("attention_bias", False))
    return {
        "vocab": f.size("vocab_size"),
        "hidden": hidden,
        "ffn": f.size("intermediate_size"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": f.size("head_dim", hidden // heads),
        "longest": f.size("max_position_embeddings"),
        "windows": (0,) * layers,
        "mixed": (False,) * layers,
        "eps": float(f.take("rms_norm_eps", 1e-6)),
        "tied": bool(f.take("tie_word_embeddings", False)),
        "qkv_bias": biased,
        "out_bias": biased,
        "stop": (stop,) if isinstance(stop, int) else tuple(stop),
    }


def windows(f: Fields, layers: int, otherwise: Callable[[int], bool]) -> tuple[int, ...]:
    """The window of each layer, from `layer_types`. If that is missing, the layers for which `otherwise` returns True have
    one."""
    size = f.take("sliding_window", 0)
    kinds = f.take("layer_types") or [
        "sliding_attention" if size and otherwise(i) else "full_attention" for i in range(layers)
    ]
    wrong = [kind for kind in kinds if kind not in ("sliding_attention", "full_attention")]
    if wrong or len(kinds) != layers:
        got = repr(wrong[0]) if wrong else f"{len(kinds)} entries"
        raise ConfigError(
            f"{f.where} has layer_types with {got}; each of {layers} layers takes sliding_attention or full_attention"
        )
    return tuple(size if kind == "sliding_attention" else 0 for kind in kinds)


def llama(f: Fields) -> dict[str, Any]:
    made = common(f)
    f.only("hidden_act", "silu")
    f.only("mlp_bias", False)
    made["rotary"], _ = rotary(f, made["head_dim"])
    return made


def mistral(f: Fields) -> dict[str, Any]:
    made = llama(f)
    made["windows"] = windows(f, len(made["windows"]), lambda layer: True)
    return made


def qwen2(f: Fields) -> dict[str, Any]:
    made = llama(f)
    f.only("use_sliding_window", False)
    f.take("sliding_window")  # which use_sliding_window switches off
    if "sliding_attention" in f.take("layer_types", []):
        raise ConfigError(
            f"{f.where} has layer_types with 'sliding_attention', which is not supported for this model_type"
        )
    return made | {"qkv_bias": True, "out_bias": False}


def qwen3(f: Fields) -> dict[str, Any]:
    biased = bool(f.take("attention_bias", False))
    return qwen2(f) | {"qk_norm": True, "qkv_bias": biased, "out_bias": biased}


def gemma2(f: Fields) -> dict[str, Any]:
    made = common(f)
    f.only("hidden_activation", "gelu_pytorch_tanh")
    f.only("hidden_act", "gelu_pytorch_tanh")
    f.only("use_bidirectional_attention", False)
    made["rotary"], _ = rotary(f, made["head_dim"])
    made["windows"] = windows(f, len(made["windows"]), lambda layer: layer % 2 == 0)
    made["tied"] = bool(f.take("tie_word_embeddings", True))
    return made | {
        "scale": float(f.take("query_pre_attn_scalar", 256)) ** -0.5,
        "activation": "gelu_tanh",
        "softcap": float(f.take("attn_logit_softcapping", 0.0)),
        "final_softcap": float(f.take("final_logit_softcapping", 0.0)),
        "post_norms": True,
        "norm_offset": 1.0,
        "embedding_scale": made["hidden"] ** 0.5,
    }


def mixtral(f: Fields) -> dict[str, Any]:
    made = mistral(f)
    experts = Experts(
        f.size("num_local_experts"),
        f.size("num_experts_per_tok"),
        made["ffn"],
        normalize=True,
        block="block_sparse_moe",
        gate_up_down=("w1", "w3", "w2"),
    )
    return made | {"experts": experts, "mixed": (True,) * len(made["mixed"])}


def qwen3_moe(f: Fields) -> dict[str, Any]:
    made, layers = qwen3(f), f.need("num_hidden_layers")
    count = f.take("num_experts") or f.take("num_local_experts") or f.need("num_experts")
    normalize = bool(f.take("norm_topk_prob", False))
    experts = Experts(count, f.size("num_experts_per_tok"), f.size("moe_intermediate_size"), normalize)
    dense, step = f.take("mlp_only_layers", []), f.size("decoder_sparse_step", 1)
    mixed = tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    return made | {"experts": experts, "mixed": mixed}


def deepseek_v2(f: Fields) -> dict[str, Any]:
    made, layers = common(f), f.need("num_hidden_layers")
    f.only("hidden_act", "silu")
    f.only("attention_bias", False)
    f.only("mlp_bias", False)
    f.only("q_lora_rank")
    f.only("topk_method", "greedy")
    f.only("scoring_func", "softmax")
    f.only("norm_topk_prob", False)
    for name in ("moe_layer_freq", "n_group", "topk_group"):
        f.only(name, 1)
    f.take("qk_head_dim")  # the sum of two other fields
    sizes = [f.size(name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    latent, ffn = Latent(*sizes), f.size("moe_intermediate_size")
    experts = Experts(
        f.size("n_routed_experts"),
        f.size("num_experts_per_tok"),
        ffn,
        normalize=False,
        factor=float(f.take("routed_scaling_factor", 1.0)),
        shared=ffn * f.take("n_shared_experts", 0),
    )
    made["rotary"], squared = rotary(f, latent.rotated, interleaved=True)
    dim, dense = latent.nope + latent.rotated, f.take("first_k_dense_replace", 0)
    return made | {
        "latent": latent,
        "experts": experts,
        "kv_heads": made["heads"],
        "head_dim": dim,
        "scale": dim**-0.5 * squared,
        "mixed": tuple(i >= dense for i in range(layers)),
    }


def gpt_oss(f: Fields) -> dict[str, Any]:
    made = common(f)
    f.only("hidden_act", "silu")
    made["rotary"], _ = rotary(f, made["head_dim"])
    made["windows"] = windows(f, len(made["windows"]), lambda layer: layer % 2 == 0)
    method = f.take("quantization_config", {}).get("quant_method", "mxfp4")
    if method != "mxfp4":
        raise ConfigError(f"{f.where} has quant_method={method!r}, which is not supported: it takes 'mxfp4'")
    experts = Experts(
        f.size("num_local_experts"),
        f.size("num_experts_per_tok"),
        made["ffn"],
        normalize=True,
        router="router",
        limit=float(f.take("swiglu_limit", 7.0)),
        alpha=float(f.take("swiglu_alpha", 1.702)),
    )
    biased, mixed = bool(f.take("attention_bias", True)), (True,) * len(made["mixed"])
    return made | {"experts": experts, "mixed": mixed, "sinks": True, "qkv_bias": biased, "out_bias": biased}


FAMILIES: dict[str, Callable[[Fields], dict[str, Any]]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "deepseek_v2": deepseek_v2,
    "gpt_oss": gpt_oss,
}


def parse(values: Mapping[str, Any], where: str = "config.json") -> Config:
    """The decoder that the fields of a `config.json` describe. Raises ConfigError if it is not supported."""
    f = Fields(values, where)
    family = f.need("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"{where} has model_type={family!r}, which is not supported: it takes {', '.join(FAMILIES)}")
    made = FAMILIES[family](f)
    f.refuse_others()
    return Config(family=family, **made)


def read(folder: Path | str) -> Config:
    """The decoder of a checkpoint's folder; the tokens that end a text may be in its `generation_config.json`. Raises
    ConfigError."""
    config = parse(_fields(Path(folder) / "config.json"), str(Path(folder) / "config.json"))
    path = Path(folder) / "generation_config.json"
    stop = _fields(path).get("eos_token_id") if path.exists() else None
    more = () if stop is None else (stop,) if isinstance(stop, int) else tuple(stop)
    return replace(config, stop=tuple(dict.fromkeys(config.stop + more)))


def _fields(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; a checkpoint is a folder with this file") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold an object of fields, got {type(values).__name__}")
    return values
