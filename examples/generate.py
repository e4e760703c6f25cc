"""Continues a text with a model, token by token, on a GPU or, if it is small, on a CPU.

    python examples/generate.py MODEL "The capital of France is"

MODEL is a folder with a checkpoint as Hugging Face lays it out: config.json, model*.safetensors and tokenizer.json. Or it is a
file that ends in .gguf, with a tokenizer.json beside it. Or it is one of the names in minfer/models/named.py, such as tiny or
llama-3.1-8b. Such a model needs no checkpoint: it has random weights, takes the bytes of the text as tokens, and answers with
numbers.

`pip install 'minfer[models]'` installs what else this needs: safetensors and tokenizers."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from minfer.models import weights
from minfer.models.config import ConfigError
from minfer.models.model import Decoder
from minfer.models.named import NAMED, named
from minfer.models.serve import Engine, RequestError, Sampling
from minfer.models.sources import Random, WeightsError

PAGE = 64
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a checkpoint's folder, a .gguf file, or a name in minfer/models/named.py")
    parser.add_argument("prompt")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="bfloat16 on a GPU, float32 on a CPU unless given")
    parser.add_argument("--weights", choices=weights.FORMATS[1:], default="", help="quantise the layers' weights")
    given = parser.parse_args(words)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", given.device):
        parser.error(f"--device is {given.device!r}; it takes cpu, cuda, or a GPU by its number, such as cuda:1")
    if given.device != "cpu" and int(given.device.partition(":")[2] or 0) >= torch.cuda.device_count():
        parser.error(f"--device is {given.device}, and PyTorch sees no such GPU here; --device cpu runs small models")
    try:
        generate(given)
    except (ConfigError, WeightsError, RequestError) as error:
        raise SystemExit(f"generate: {error}") from None


def generate(given: argparse.Namespace) -> None:
    dtype = DTYPES[given.dtype or ("float32" if given.device == "cpu" else "bfloat16")]
    if given.model in NAMED:
        decoder = weights.build(named(given.model), Random(given.seed), given.device, dtype, given.weights)
        prompt, text_of = list(given.prompt.encode()), lambda tokens: "".join(f"{token} " for token in tokens)
    else:
        encode, text_of = tokenizer(Path(given.model))  # before the weights, which take longer
        decoder = weights.load(given.model, given.device, dtype, given.weights, progress)
        prompt = encode(given.prompt)
    sampling = Sampling(given.max_tokens, given.temperature, given.top_k, given.top_p, seed=given.seed)
    start, count = time.perf_counter(), 0
    for text in stream(decoder, prompt, sampling, text_of):
        print(text, end="", flush=True)
        count += 1
    print()
    print(f"{count} tokens in {time.perf_counter() - start:.1f} s, compiling included", file=sys.stderr)


def stream(
    decoder: Decoder, prompt: list[int], sampling: Sampling, text_of: Callable[[list[int]], str]
) -> Iterator[str]:
    """What each token adds to the text. A character that is made of several tokens comes with the last of them."""
    # no more than the model has positions: the engine refuses what needs more
    room = min(len(prompt) + max(1, sampling.max_tokens), decoder.config.longest)
    engine = Engine(decoder, pages=-(-room // PAGE), page=PAGE)
    tokens: list[int] = []
    sent = 0
    for token in engine.stream(engine.submit(prompt, sampling)):
        tokens.append(token)
        text = text_of(tokens)
        whole = text.rstrip("\N{REPLACEMENT CHARACTER}")
        yield whole[sent:]
        sent = max(sent, len(whole))


def tokenizer(folder: Path) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    """From text to tokens, and back."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise WeightsError("reading text needs the package tokenizers: pip install 'minfer[models]'") from None
    if not folder.exists():
        raise ConfigError(f"{folder} is neither a file, a folder nor one of the names {', '.join(NAMED)}")
    path = (folder if folder.is_dir() else folder.parent) / "tokenizer.json"
    try:
        made = Tokenizer.from_file(str(path))
    except Exception as error:  # of Rust, without a type of its own
        raise WeightsError(f"{path} cannot be read as a tokenizer: {error}") from None
    return (lambda text: made.encode(text).ids), made.decode


def progress(done: int, total: int) -> None:
    if sys.stderr.isatty() or done == total:
        end = "\n" if done == total else ""
        print(f"\rloading: {done / 1e9:.1f} of {total / 1e9:.1f} GB", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
