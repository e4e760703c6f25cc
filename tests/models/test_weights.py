"""Weights are loaded to where they belong, and a checkpoint that is not whole is refused with its file and tensor."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch

import minfer
from minfer.models import families, weights
from minfer.models.model import Linear
from minfer.models.named import named
from minfer.models.sources import Random, WeightsError
from tests.models import tiny

pytest.importorskip("safetensors", reason="needs safetensors: pip install 'minfer[models]'")
from safetensors import safe_open
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return tiny.checkpoint("mixtral", tmp_path_factory.mktemp("whole") / "mixtral", num_hidden_layers=1)


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


def shards(folder) -> None:
    """The checkpoint in two files and an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def change(folder, **other) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in other.items():
        name = name.replace("__", ".")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


def logits(decoder) -> torch.Tensor:
    return tiny.run(decoder, [tiny.prompt(12)], [[12]])[0][11]


def test_one_file_and_shards_are_the_same_and_progress_is_told(whole, folder):
    told = []
    one = weights.load(whole, "cpu", torch.float32, progress=lambda done, total: told.append((done, total)))
    shards(folder)
    assert torch.equal(logits(one), logits(weights.load(folder, "cpu", torch.float32)))
    with safe_open(whole / "model.safetensors", "pt") as file:
        assert len(told) == len(file.keys()) + 1
    done = [each for each, _ in told]
    assert done == sorted(done) and 0.9 < done[-2] / told[0][1] < 1.0 and done[-1] == told[0][1]


REFUSED = {
    "truncated": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100]),
        r"model\.safetensors is truncated or no safetensors file",
    ),
    "no tensor": (
        lambda folder: change(folder, model__norm__weight=None),
        r"copy lacks the tensor model\.norm\.weight, which its config\.json asks for",
    ),
    "another shape": (
        lambda folder: change(folder, lm_head__weight=torch.zeros(97, 65)),
        r"model\.safetensors has lm_head\.weight of the shape \(97, 65\), where its config\.json asks for \(97, 64\)",
    ),
    "another type": (
        lambda folder: change(folder, lm_head__weight=torch.zeros(97, 64, dtype=torch.int8)),
        r"model\.safetensors has lm_head\.weight of torch\.int8, where float32, float16 or bfloat16 was expected",
    ),
    "more tensors": (
        lambda folder: change(folder, model__layers__0__self_attn__q_proj__bias=torch.zeros(256)),
        r"has the tensor model\.layers\.0\.self_attn\.q_proj\.bias, which is not part of a model with its config\.json",
    ),
    "no file": (
        lambda folder: (folder / "model.safetensors").unlink(),
        r"copy has neither model\.safetensors nor model\.safetensors\.index\.json",
    ),
    "no shard": (
        lambda folder: (shards(folder), (folder / "b.safetensors").unlink()),
        r"b\.safetensors is missing, which model\.safetensors\.index\.json names",
    ),
    "a wrong index": (
        lambda folder: (shards(folder), shutil.copy(folder / "a.safetensors", folder / "b.safetensors")),
        r"[ab]\.safetensors lacks the tensor .*, which model\.safetensors\.index\.json says it has",
    ),
    "no index": (
        lambda folder: (shards(folder), (folder / "model.safetensors.index.json").write_text("[]")),
        r"index\.json is not an index of safetensors",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_checkpoint_that_is_not_whole_is_refused_with_its_file_and_tensor(mistake, folder):
    make, message = REFUSED[mistake]
    make(folder)
    with pytest.raises(WeightsError, match=message) as caught:
        weights.load(folder, "cpu", torch.float32)
    assert "\n" not in str(caught.value)


def test_a_package_that_is_missing_is_named(whole, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(WeightsError, match=r"needs the package safetensors: pip install 'minfer\[models\]'"):
        weights.load(whole)


def test_random_weights_are_those_of_the_seed():
    first, again, other = (
        logits(weights.build(named("tiny"), Random(seed), "cpu", torch.float32)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("format", [pytest.param("fp8", marks=pytest.mark.slow), "int4_g64"])
def test_quantised_weights_give_what_the_dequantised_ones_give(format):
    fields = tiny.config_of("llama", intermediate_size=128)  # whole groups of 64
    config, source = families.parse(fields), tiny.Hashed(fields)
    decoder = weights.build(config, source, "cpu", torch.bfloat16, format)
    quantised = logits(decoder)
    count = 0
    for layer in decoder.layers:
        for part, name in (
            (layer.attention, "qkv"),
            (layer.attention, "out"),
            (layer.feed, "gate_up"),
            (layer.feed, "down"),
        ):
            kept = getattr(part, name)
            if kept.format:
                plain = minfer.dequant(kept.weight, kept.format, kept.scales, dtype=torch.bfloat16)
                setattr(part, name, Linear(plain))
                count += 1
    assert count == 12
    assert tiny.error(quantised, logits(decoder)) <= 2e-2
    far = {"fp8": 0.1, "int4_g64": 0.3}[format]
    assert tiny.error(quantised, logits(weights.build(config, source, "cpu", torch.bfloat16))) <= far


def test_quantised_weights_that_cannot_be_are_refused():
    config = named("tiny")
    with pytest.raises(WeightsError, match="may be quantised to fp8, int4_g64, int4_g128, got 'int3'"):
        weights.build(config, Random(), "cpu", torch.bfloat16, "int3")
    with pytest.raises(WeightsError, match="weights of fp8 take a dtype of float16 or bfloat16, got float32"):
        weights.build(config, Random(), "cpu", torch.float32, "fp8")
    with pytest.raises(WeightsError, match=r"int4_g128 takes weights whose rows are multiples of 128, got \(512, 64\)"):
        weights.build(config, Random(), "cpu", torch.bfloat16, "int4_g128")


def test_mxfp4_is_unpacked_to_the_values_of_its_table():
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (2, 5, 3, 32), generator=generator)
    exponents = torch.randint(120, 131, (2, 5, 3), generator=generator, dtype=torch.uint8)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    sign, exponent, mantissa = codes >> 3, codes >> 1 & 3, codes & 1
    magnitude = torch.where(exponent > 0, (1 + mantissa / 2) * 2.0 ** (exponent - 1), mantissa / 2)  # e2m1
    wanted = (1 - 2 * sign) * magnitude * 2.0 ** (exponents.double() - 127)[..., None]
    assert torch.equal(weights.unpack_mxfp4(blocks, exponents, torch.bfloat16).double(), wanted.flatten(-2))


def test_gpt_oss_is_loaded_packed_and_unpacked(tmp_path):
    folder = tiny.checkpoint("gpt_oss", tmp_path / "plain", num_hidden_layers=1)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(5)
    packed = dict(tensors)
    for part, out, columns in (("gate_up", 192, 64), ("down", 64, 96)):
        name = f"model.layers.0.mlp.experts.{part}_proj"
        blocks = torch.randint(0, 256, (4, out, columns // 32, 16), generator=generator).to(torch.uint8)
        exponents = torch.randint(121, 124, (4, out, columns // 32), generator=generator).to(torch.uint8)
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
        tensors[name] = weights.unpack_mxfp4(blocks, exponents, torch.bfloat16).transpose(1, 2).contiguous()
    shutil.copytree(folder, tmp_path / "packed")
    save_file(tensors, folder / "model.safetensors")
    save_file(packed, tmp_path / "packed" / "model.safetensors")
    first, second = (weights.load(tmp_path / name, "cpu", torch.float32) for name in ("plain", "packed"))
    assert torch.equal(logits(first), logits(second))
