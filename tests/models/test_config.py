"""A config is read as what it says, and what the decoder does not support is refused by its name."""

from __future__ import annotations

import json

import pytest
import torch

from minfer.models import families, weights
from minfer.models.config import ConfigError
from minfer.models.named import NAMED, named
from minfer.models.rotary import Rotary
from tests.models import tiny

REFUSED = [
    ("llama", {"model_type": "mamba"}, "model_type='mamba', which is not supported: it takes llama, mistral"),
    ("llama", {"model_type": None}, "lacks the field model_type"),
    ("llama", {"hidden_size": None}, "lacks the field hidden_size"),
    ("llama", {"hidden_size": "many"}, "hidden_size='many', which must be an int from 1"),
    ("llama", {"hidden_act": "relu"}, "hidden_act='relu', which is not supported: it takes 'silu'"),
    ("llama", {"mlp_bias": True}, "mlp_bias=True, which is not supported"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads=3, which does not divide 4 heads"),
    ("llama", {"head_dim": None, "hidden_size": 65}, "hidden_size=65, which num_attention_heads=4 does not divide"),
    ("llama", {"quantization_config": {"bits": 4}}, "the field quantization_config={'bits': 4}, which minfer does not know"),
    ("llama", {"logit_scale": 0.5}, "the field logit_scale=0.5, which minfer does not know and which may change the result"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic', which is not supported"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "lacks factor for its rope_type 'linear'"),
    ("llama", {"rope_scaling": {**tiny.LLAMA3, "wave": 2}}, "wave=2 for rope_type 'llama3', which is not supported"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5, which is not supported: it takes 1.0"),
    ("qwen3", {"use_sliding_window": True}, "use_sliding_window=True, which is not supported"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "'sliding_attention', which is not supported for this model_type"),
    ("gemma2", {"layer_types": ["full_attention"]}, "layer_types with 1 entries; each of 3 layers takes"),
    ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "layer_types with 'chunked_attention'"),
    ("deepseek_v2", {"q_lora_rank": 1536}, "q_lora_rank=1536, which is not supported: it takes null"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "topk_method='group_limited_greedy', which is not supported"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True, which is not supported: it takes False"),
    ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, "quant_method='awq', which is not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "other", "message"), REFUSED, ids=[f"{f}-{next(iter(o))}" for f, o, _ in REFUSED])
def test_what_is_not_supported_is_refused_by_name(family, other, message):
    with pytest.raises(ConfigError, match="config") as caught:
        families.parse(tiny.config_of(family, **other))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[]", "must hold an object of fields, got list"), (None, "cannot be read")],
)
def test_a_file_that_is_no_config_is_refused(text, message, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        families.read(tmp_path)


def test_fields_are_read_as_they_were_written_at_any_time():
    old = tiny.config_of("llama")
    new = {key: value for key, value in old.items() if key not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {**tiny.LLAMA3, "rope_theta": 500000.0}
    assert families.parse(old) == families.parse(new)
    assert families.parse(old).rotary == Rotary(64, 500000.0, "llama3", 8.0, 64)
    windows = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    assert families.parse(tiny.config_of("gemma2", **windows)) == families.parse(tiny.config_of("gemma2"))
    assert families.parse(tiny.config_of("gemma2")).windows == (20, 0, 20)
    assert families.parse(tiny.config_of("mistral", sliding_window=None)).windows == (0, 0, 0)
    harmless = {"_name_or_path": "x", "torch_dtype": "bfloat16", "use_cache": True, "new_switch": False}
    assert families.parse(tiny.config_of("qwen3", **harmless)) == families.parse(tiny.config_of("qwen3"))


def test_tokens_that_end_a_text_are_in_either_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny.config_of("llama", eos_token_id=3)))
    assert families.read(tmp_path).stop == (3,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    assert families.read(tmp_path).stop == (3, 5)


# Parameters in thousand millions, as the models' pages give them.
PUBLISHED = {
    "llama-3.2-1b": 1.236,
    "llama-3.1-8b": 8.030,
    "qwen3-0.6b": 0.596,
    "qwen3-8b": 8.191,
    "mistral-7b-v0.1": 7.242,
    "gemma-2-2b": 2.614,
    "mixtral-8x7b": 46.70,
    "qwen3-30b-a3b": 30.53,
    "deepseek-v2-lite": 15.71,
    "gpt-oss-20b": 20.91,
}


class Counting(tiny.Hashed):
    def fill(self, name: str, out: torch.Tensor) -> None:
        self.made[name] = out


@pytest.mark.parametrize(
    "name", [name if name == "qwen3-0.6b" else pytest.param(name, marks=pytest.mark.slow) for name in PUBLISHED]
)
def test_a_named_model_has_as_many_parameters_as_the_published_one(name):
    source = Counting(NAMED[name])
    weights.build(named(name), source, "meta")
    assert sum(tensor.numel() for tensor in source.made.values()) / 1e9 == pytest.approx(PUBLISHED[name], rel=1e-3)


def test_another_name_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="no config named 'llama-9'; there are tiny"):
        named("llama-9")
