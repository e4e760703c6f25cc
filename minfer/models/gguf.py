"""Reads GGUF files, as llama.cpp writes them. Such a file has a model's description and its packed weights.

Written from the format's description (github.com/ggml-org/ggml, docs/gguf.md). In a decoder of a 16-bit type, packed weights
that `quant_gemm` takes stay packed. The weights of an embedding, and all weights of a decoder in fp32, are unpacked once."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from minfer.functional.quantised import dequant
from minfer.models.config import Config, ConfigError
from minfer.models.families import parse
from minfer.models.sources import WeightsError

Tensor = torch.Tensor
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
# By the number of a type: its name in `minfer.dequant`, the weights of a block, and its bytes.
PACKED = {2: ("q4_0", 32, 18), 8: ("q8_0", 32, 34), 12: ("q4_k", 256, 144), 14: ("q6_k", 256, 210)}
# A checkpoint's names, and the file's; {} is the number of a layer.
NAMES = {
    r"model\.embed_tokens": "token_embd",
    r"model\.norm": "output_norm",
    r"lm_head": "output",
    r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj": "blk.{}.attn_{}",
    r"model\.layers\.(\d+)\.self_attn\.o_proj": "blk.{}.attn_output",
    r"model\.layers\.(\d+)\.self_attn\.([qk])_norm": "blk.{}.attn_{}_norm",
    r"model\.layers\.(\d+)\.input_layernorm": "blk.{}.attn_norm",
    r"model\.layers\.(\d+)\.post_attention_layernorm": "blk.{}.ffn_norm",
    r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj": "blk.{}.ffn_{}",
}
FAMILIES = ("llama", "qwen2", "qwen3")
FREQUENCIES = "rope_freqs.weight"


@dataclass(frozen=True)
class Entry:
    """A tensor of the file: its shape as PyTorch has it, the number of its type, and where its bytes are."""

    shape: tuple[int, ...]
    type: int
    start: int
    nbytes: int


class Gguf:
    """A source of weights for `weights.build`. Raises WeightsError for a file that is truncated or no GGUF file."""

    def __init__(self, path: Path | str, progress: Callable[[int, int], None] | None = None) -> None:
        self.path, self.progress, self.done = Path(path), progress, 0
        self.fields: dict[str, Any] = {}
        self.entries: dict[str, Entry] = {}
        self.asked: set[str] = set()
        try:
            self.size = self.path.stat().st_size
            self.bytes = torch.from_file(str(self.path), size=self.size, dtype=torch.uint8)  # mapped into memory
        except (OSError, RuntimeError) as error:
            raise WeightsError(f"{path} cannot be read: {error}") from None
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, KeyError):
            raise WeightsError(f"{path} is truncated or no GGUF file: its header ends too early") from None
        self.family = str(self.fields.get("general.architecture"))
        self.heads = {part: self.fields.get(f"{self.family}.attention.head_count{part}") for part in ("", "_kv")}

    def _read_header(self) -> None:
        at, data = 0, self.bytes.numpy().data

        def scalar(kind: str) -> Any:
            nonlocal at
            (value,) = struct.unpack_from(kind, data, at)
            at += struct.calcsize(kind)
            return value

        def text() -> str:
            nonlocal at
            count = scalar("<Q")
            if at + count > len(data):
                raise struct.error
            at += count
            return bytes(data[at - count : at]).decode()

        def value(kind: int) -> Any:
            if kind == STRING:
                return text()
            if kind == ARRAY:
                of = scalar("<I")
                return [value(of) for _ in range(scalar("<Q"))]
            return scalar(SCALARS[kind])

        magic, version = bytes(data[:4]), struct.unpack_from("<I", data, 4)[0]
        if magic != b"GGUF" or version not in (2, 3):
            raise WeightsError(f"{self.path} is no GGUF file of version 2 or 3")
        at = 8
        tensors, fields = scalar("<Q"), scalar("<Q")
        for _ in range(fields):
            name = text()
            self.fields[name] = value(scalar("<I"))
        found = []
        for _ in range(tensors):
            name = text()
            shape = tuple(scalar("<Q") for _ in range(scalar("<I")))[::-1]  # the file has the fastest dimension first
            found.append((name, shape, scalar("<I"), scalar("<Q")))
        unit = self.fields.get("general.alignment", 32)
        data_start = -(-at // unit) * unit
        for name, shape, kind, offset in found:
            if kind not in FLOATS and kind not in PACKED:
                known = ", ".join(["F32", "F16", "BF16", *(each.upper() for each, *_ in PACKED.values())])
                raise WeightsError(f"{self.path} has {name} of type {kind}, which is not supported: it takes {known}")
            count = 1
            for length in shape:
                count *= length
            nbytes = count * FLOATS[kind].itemsize if kind in FLOATS else count // PACKED[kind][1] * PACKED[kind][2]
            if data_start + offset + nbytes > self.size:
                raise WeightsError(f"{self.path} is truncated: it ends before {name} does")
            self.entries[name] = Entry(shape, kind, data_start + offset, nbytes)

    def config(self) -> Config:
        """The model's config. Raises ConfigError for a model that is not supported."""
        if self.family not in FAMILIES:
            raise ConfigError(
                f"{self.path} has the architecture {self.family!r}; of GGUF, minfer reads {', '.join(FAMILIES)}"
            )

        def field(name: str, default: Any = None) -> Any:
            return self.fields.get(f"{self.family}.{name}", default)

        for name, usual in (("expert_count", 0), ("rope.scaling.type", "none")):
            if field(name, usual) != usual:
                raise ConfigError(f"{self.path} has {self.family}.{name}={field(name)!r}, which is not supported")
        values = {
            "model_type": self.family,
            "vocab_size": self.entries["token_embd.weight"].shape[0] if "token_embd.weight" in self.entries else None,
            "hidden_size": field("embedding_length"),
            "num_hidden_layers": field("block_count"),
            "intermediate_size": field("feed_forward_length"),
            "num_attention_heads": field("attention.head_count"),
            "num_key_value_heads": field("attention.head_count_kv"),
            "head_dim": field("attention.key_length"),
            "max_position_embeddings": field("context_length"),
            "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
            "rope_theta": field("rope.freq_base"),
            "eos_token_id": self.fields.get("tokenizer.ggml.eos_token_id"),
            "tie_word_embeddings": "output.weight" not in self.entries,
            "attention_bias": self.family == "llama" and "blk.0.attn_q.bias" in self.entries,
        }
        config = parse(values, str(self.path))
        if FREQUENCIES not in self.entries:
            return config
        self.asked.add(FREQUENCIES)
        divisors = tuple(self._raw(FREQUENCIES).view(torch.float32).tolist())
        return replace(config, rotary=replace(config.rotary, divisors=divisors))

    def has(self, name: str) -> bool:
        return self._name(name) in self.entries

    def packed(self, name: str, rows: int, columns: int) -> tuple[Tensor, str] | None:
        """A matrix as it is packed, uint8 (rows, bytes), and its format; None where it is not packed."""
        entry = self._entry(name, (rows, columns))
        if entry.type not in PACKED:
            return None
        return self._in_order(name, self._raw(self._name(name)).view(rows, -1)), PACKED[entry.type][0]

    def fill(self, name: str, out: Tensor) -> None:
        entry = self._entry(name, tuple(out.shape))
        raw = self._raw(self._name(name))
        if entry.type in FLOATS:
            made = raw.view(FLOATS[entry.type]).view(out.shape)
            out.copy_(self._in_order(name, made))
        else:
            packed = self._in_order(name, raw.view(entry.shape[0], -1)).to(out.device)
            out.copy_(dequant(packed, PACKED[entry.type][0], dtype=out.dtype))

    def finish(self) -> None:
        for name in self.entries.keys() - self.asked:
            raise WeightsError(f"{self.path} has the tensor {name}, which is not part of a model with its fields")
        if self.progress is not None:
            self.progress(self.size, self.size)

    def _name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        for pattern, ours in NAMES.items():
            if match := re.fullmatch(pattern, stem):
                return f"{ours.format(*match.groups())}.{kind}"
        return name

    def _entry(self, name: str, shape: tuple[int, ...]) -> Entry:
        ours = self._name(name)
        if ours not in self.entries:
            raise WeightsError(f"{self.path} lacks the tensor {ours}, which its fields ask for")
        entry = self.entries[ours]
        if entry.shape != shape:
            raise WeightsError(f"{self.path} has {ours} of the shape {entry.shape}, where its fields ask for {shape}")
        return entry

    def _raw(self, name: str) -> Tensor:
        entry = self.entries[name]
        if name not in self.asked:
            self.asked.add(name)
            self.done += entry.nbytes
            if self.progress is not None:
                self.progress(self.done, self.size)
        return self.bytes[entry.start : entry.start + entry.nbytes]

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        """Rows of q and k in a checkpoint's order. In models of the architecture llama, llama.cpp's converter puts the two
        elements of a pair that rope rotates side by side."""
        if self.family != "llama" or not (match := re.search(r"\.([qk])_proj\.", name)):
            return rows
        heads = self.heads["" if match[1] == "q" else "_kv"] or self.heads[""]
        return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(rows.shape)
