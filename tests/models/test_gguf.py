"""A GGUF file, as llama.cpp writes it, is the model that its checkpoint is."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import minfer
from minfer.models import families, weights
from minfer.models.config import ConfigError
from minfer.models.gguf import NAMES, Gguf
from minfer.models.model import Linear, Stacked
from minfer.models.sources import WeightsError
from tests.models import tiny

gguf = pytest.importorskip("gguf", reason="needs gguf: pip install --group test")
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}  # whole blocks
TYPES = {"q8_0": "Q8_0", "q4_0": "Q4_0", "f32": "F32", "bf16": "BF16"}


def rows_as_llama_cpp_has_them(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Pairs that rope turns side by side: what its converter does to q and k of a llama."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def write(path, family: str, kinds: dict[str, str], **other) -> dict[str, torch.Tensor]:
    """A file whose tensors are packed by the first of `kinds` that is in their name, or as bf16; norms are f32. Returns what it
    holds."""
    fields = {**tiny.config_of(family, **SIZES), **other}
    source = tiny.Hashed(fields)
    weights.build(families.parse(fields), source)
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(512), writer.add_embedding_length(256), writer.add_block_count(2)
    writer.add_feed_forward_length(512), writer.add_head_count(4), writer.add_head_count_kv(2)
    writer.add_key_length(64), writer.add_layer_norm_rms_eps(1e-5), writer.add_rope_freq_base(500000.0)
    writer.add_token_list([f"w{i}" for i in range(97)]), writer.add_eos_token_id(3), writer.add_float32("x.y", 0.5)
    held = {}
    for name, tensor in source.made.items():
        stem, _, end = name.rpartition(".")
        pattern, ours = next((p, n) for p, n in NAMES.items() if re.fullmatch(p, stem))
        ours = f"{ours.format(*re.fullmatch(pattern, stem).groups())}.{end}"
        kind = (
            "f32" if "norm" in name or end == "bias" else next((k for part, k in kinds.items() if part in ours), "bf16")
        )
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = rows_as_llama_cpp_has_them(tensor, 4 if "q_proj" in name else 2)
        number = gguf.GGMLQuantizationType[TYPES[kind]]
        packed = gguf.quants.quantize(np.ascontiguousarray(tensor.float().numpy()), number)
        writer.add_tensor(ours, packed, raw_dtype=number)
        held[ours] = torch.from_numpy(gguf.quants.dequantize(packed, number)).view(tensor.shape)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    return held


def logits(decoder) -> torch.Tensor:
    return tiny.run(decoder, [tiny.prompt(12)], [[11], [1]])[0][11]


SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in ("qwen2", "qwen3")]
PLAIN = {"rope_scaling": None, "rope_parameters": None, "rope_theta": 500000.0, "head_dim": 64}


@pytest.mark.parametrize("family", ["llama", *SLOW])
def test_a_file_that_loses_nothing_is_the_model_of_its_checkpoint(family, tmp_path):
    write(tmp_path / "model.gguf", family, {}, **PLAIN)
    decoder = weights.load(tmp_path / "model.gguf", "cpu", torch.float32)
    assert decoder.config.stop == (3,)
    assert torch.equal(logits(decoder), logits(tiny.decoder(family, **SIZES, **PLAIN)))


MIXED = {"attn_v": "q8_0", "attn": "q4_0", "ffn_gate": "q8_0", "ffn": "q8_0", "output": "q8_0", "token": "q4_0"}


def test_packed_weights_stay_packed_and_give_what_they_stand_for(tmp_path):
    held = write(tmp_path / "model.gguf", "llama", MIXED, rope_scaling=None)
    decoder = weights.load(tmp_path / "model.gguf", "cpu", torch.bfloat16)
    layer = decoder.layers[1]
    assert isinstance(layer.attention.qkv, Stacked)  # of two formats
    assert [part.format for part in layer.attention.qkv.parts] == ["q4_0", "q4_0", "q8_0"]
    assert (layer.feed.gate_up.format, decoder.head.format) == ("q8_0", "q8_0")
    down = minfer.dequant(layer.feed.down.weight, "q8_0", dtype=torch.float32)
    assert torch.equal(down, held["blk.1.ffn_down.weight"])
    assert torch.equal(decoder.table, held["token_embd.weight"].bfloat16())

    full = weights.load(tmp_path / "model.gguf", "cpu", torch.float32)
    assert isinstance(full.head, Linear) and not full.head.format
    assert torch.equal(full.layers[1].feed.down.weight, down)
    assert tiny.error(logits(decoder), logits(full)) <= 2e-2


@pytest.mark.slow
def test_transformers_puts_the_rows_of_q_and_k_in_the_same_order(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install --group test")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    write(tmp_path / "model.gguf", "llama", {}, **PLAIN)
    empty = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**{**tiny.config_of("llama", **SIZES), **PLAIN})
    )
    read = load_gguf_checkpoint(str(tmp_path / "model.gguf"), return_tensors=True, model_to_load=empty)["tensors"]
    source = Gguf(tmp_path / "model.gguf")
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        wanted = read[f"model.layers.1.self_attn.{name}.weight"]
        found = torch.empty(wanted.shape)
        source.fill(f"model.layers.1.self_attn.{name}.weight", found)
        assert torch.equal(found, wanted.float())


@pytest.mark.slow
def test_frequencies_that_a_file_divides_are_those_of_the_scaling(tmp_path):
    """Llama 3.1's scaling of rope is a tensor in GGUF."""
    config = families.parse(tiny.config_of("llama"))
    plain = families.parse(tiny.config_of("llama", rope_scaling=None))
    divisors = (plain.rotary.frequencies() / config.rotary.frequencies()).numpy()
    add = gguf.GGUFWriter.write_header_to_file

    def with_divisors(writer):
        writer.add_tensor("rope_freqs.weight", np.ascontiguousarray(divisors))
        add(writer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_divisors)
        write(tmp_path / "model.gguf", "llama", {})
    decoder = weights.load(tmp_path / "model.gguf", "cpu", torch.float32)
    assert tiny.error(logits(decoder), logits(tiny.decoder("llama", **SIZES))) <= 1e-5


def test_a_file_that_is_not_whole_or_not_known_is_refused_in_a_sentence(tmp_path):
    path = tmp_path / "model.gguf"
    write(path, "llama", {}, rope_scaling=None)
    whole = path.read_bytes()

    def refused(content: bytes, message: str, kind: type = WeightsError) -> None:
        path.write_bytes(content)
        with pytest.raises(kind, match=message) as caught:
            weights.load(path, "cpu", torch.float32)
        assert "\n" not in str(caught.value) and "model.gguf" in str(caught.value)

    refused(whole[:-100], r"is truncated: it ends before \S+ does")
    refused(whole[:300], "is truncated or no GGUF file")
    refused(b"GGML" + whole[4:], "is no GGUF file of version 2 or 3")
    other = whole.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1)
    refused(other, "architecture 'mamba'; of GGUF", ConfigError)
    refused(whole.replace(b"output_norm.weight", b"output_morn.weight"), r"lacks the tensor output_norm\.weight")
    with pytest.raises(WeightsError, match="cannot be read"):
        Gguf(tmp_path / "nothing.gguf")
