"""Where a decoder's weights come from: safetensors as Hugging Face lays them out, or random numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

Tensor = torch.Tensor


class WeightsError(ValueError):
    """A checkpoint cannot be loaded; the message is one sentence, with the file and the tensor."""


class Source(Protocol):
    def fill(self, name: str, out: Tensor) -> None:
        """Write the tensor of this name into `out`. Raises WeightsError."""

    def has(self, name: str) -> bool: ...

    def packed(self, name: str, rows: int, columns: int) -> tuple[Tensor, str] | None:
        """A matrix as `quant_gemm` takes it, and its format; None where the source has it in full. Raises WeightsError."""

    def finish(self) -> None:
        """Raise WeightsError if there are tensors that nothing asked for."""


class Random:
    """Weights drawn from the seed and a tensor's name: norms are ones, biases and sinks zeros, all else normal with a deviation
    of 0.02. The numbers are drawn on the device, so that they differ between a CPU and a GPU."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def fill(self, name: str, out: Tensor) -> None:
        if name.endswith(("bias", "sinks")):
            out.zero_()
        elif "norm" in name:
            out.fill_(1.0)
        else:
            digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
            generator = torch.Generator(out.device).manual_seed(int.from_bytes(digest[:7]))
            out.normal_(0.0, 0.02, generator=generator)

    def has(self, name: str) -> bool:
        return not name.endswith(("_blocks", "_scales"))

    def packed(self, name: str, rows: int, columns: int) -> None:
        return None

    def finish(self) -> None:
        pass


class Checkpoint:
    """The safetensors of a folder: `model.safetensors`, or the files that `model.safetensors.index.json` names. Files are
    mapped into memory, and `progress(bytes so far, bytes in all)` is called after each tensor and at the end."""

    # Tensors that follow from the config, and tied heads that are stored nevertheless
    NOT_NEEDED = ("rotary_emb.inv_freq", "lm_head.weight")

    def __init__(self, folder: Path | str, progress: Callable[[int, int], None] | None = None) -> None:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise WeightsError(
                "reading a checkpoint needs the package safetensors: pip install 'minfer[models]'"
            ) from None
        self.folder, self.progress, self.done = Path(folder), progress, 0
        self.files: dict[str, Path] = {}
        self.opened: dict[Path, Any] = {}
        self.asked: set[str] = set()
        paths, listed = self._list()
        for path in paths:
            try:
                self.opened[path] = safe_open(str(path), framework="pt")
            except FileNotFoundError:
                raise WeightsError(f"{path} is missing, which model.safetensors.index.json names") from None
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{path} is truncated or no safetensors file: {error}") from None
            self.files |= dict.fromkeys(self.opened[path].keys(), path)
        for name, path in listed.items():
            if self.files.get(name) != path:
                raise WeightsError(f"{path} lacks the tensor {name}, which model.safetensors.index.json says it has")
        self.total = sum(path.stat().st_size for path in paths)

    def _list(self) -> tuple[list[Path], dict[str, Path]]:
        """The files, and the file of each tensor if there is an index."""
        index, single = self.folder / "model.safetensors.index.json", self.folder / "model.safetensors"
        if not index.exists():
            if not single.exists():
                raise WeightsError(f"{self.folder} has neither model.safetensors nor model.safetensors.index.json")
            return [single], {}
        try:
            listed = {
                name: self.folder / Path(file).name
                for name, file in json.loads(index.read_text())["weight_map"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise WeightsError(f"{index} is not an index of safetensors: it must be JSON with a weight_map") from None
        return sorted(set(listed.values())), listed

    def has(self, name: str) -> bool:
        return name in self.files

    def packed(self, name: str, rows: int, columns: int) -> None:
        return None

    def fill(self, name: str, out: Tensor) -> None:
        if name not in self.files:
            raise WeightsError(f"{self.folder} lacks the tensor {name}, which its config.json asks for")
        path = self.files[name]
        shape = tuple(self.opened[path].get_slice(name).get_shape())
        if shape != tuple(out.shape):
            raise WeightsError(
                f"{path} has {name} of the shape {shape}, where its config.json asks for {tuple(out.shape)}"
            )
        tensor = self.opened[path].get_tensor(name)
        if out.dtype != tensor.dtype and not (
            out.is_floating_point() and tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
        ):
            raise WeightsError(f"{path} has {name} of {tensor.dtype}, where float32, float16 or bfloat16 was expected")
        out.copy_(tensor)
        self.asked.add(name)
        self.done += tensor.nbytes
        if self.progress is not None:
            self.progress(self.done, self.total)

    def finish(self) -> None:
        for name in self.files.keys() - self.asked:
            if not name.endswith(self.NOT_NEEDED):
                raise WeightsError(
                    f"{self.files[name]} has the tensor {name}, which is not part of a model with its config.json"
                )
        if self.progress is not None:
            self.progress(self.total, self.total)
