"""Draws problems at random from the layers of public models, for example for `draw.problems=200`.

An op calls `op.draws("product")`, which names a function of this file, or passes a function of its own. Kernels are tuned at
the sizes of an op's sets of shapes; drawn problems show whether they are slow at other sizes. The sizes of the models in
`models.csv` are from their public configurations.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

MODELS = Path(__file__).with_name("models.csv")
MOST_TOKENS = {"cuda": 8192, "cpu": 128}
MOST_LOGITS = 512  # tokens of a step whose logits are computed: one for each request
CPU_FACTOR = 8  # the layers that a CPU gets are narrower by this factor
# Lengths of prompts in tokens: the least, each sixteenth of the distribution, and the most. They are of the requests to two
# services within an hour, in the Azure LLM inference dataset of 2023 (Patel et al., Splitwise: efficient generative LLM
# inference using phase splitting, ISCA 2024).
PROMPTS = {
    "conversation": (2, 194, 235, 383, 396, 405, 428, 966, 1020, 1052, 1083, 1120, 1189, 1335, 2309, 4079, 14050),
    "code": (3, 90, 185, 348, 578, 825, 1016, 1196, 1469, 1734, 2048, 2371, 2745, 3330, 4434, 6499, 7437),
}
# The dimensions of heads that the kernels of attention have. In drawn problems with heads of 192, those of values are 128.
DECODED, PREFILLED, V_DIM = (64, 128, 256), (64, 96, 128, 192, 256), {192: 128}
TRIES = 100  # for each problem that is asked for


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder. `ffn` is 0 where all layers have experts, `experts` where none has."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    experts: int
    experts_per_token: int
    expert_ffn: int

    def narrowed(self, factor: int) -> Model:
        """The same model, narrower by `factor`: widths become multiples of 64, there are fewer heads, and as many experts."""
        widths = {
            name: -(-getattr(self, name) // factor // 64) * 64 for name in ("hidden", "ffn", "vocab", "expert_ffn")
        }
        return replace(self, **widths, heads=max(1, self.heads // factor), kv_heads=max(1, self.kv_heads // factor))


@dataclass(frozen=True)
class Problem:
    """What a case says besides its op and kernel. Parameters that are left out have their defaults."""

    dtype: str
    shape: dict[str, int]
    params: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """What a problem is drawn from: random numbers, one model, and the most tokens that a step has."""

    rng: random.Random
    model: Model
    most_tokens: int

    def tokens(self, most: int | None = None) -> int:
        """The tokens of a step, from 1, log-uniform and not rounded."""
        return self.log_uniform(most or self.most_tokens)

    def log_uniform(self, most: int) -> int:
        """An integer from 1 to `most`. Each range from n to 2 n is about as likely as any other."""
        return int((most + 1) ** self.rng.random())

    def prompt(self, most: int) -> int:
        """The tokens of a prompt, from 1 to `most`: half are log-uniform, half are drawn from one of two traces,
        and are shorter on a CPU."""
        if self.rng.random() < 0.5:
            return self.log_uniform(most)
        quantiles = self.rng.choice([*PROMPTS.values()])
        place, rest = divmod(self.rng.random() * (len(quantiles) - 1), 1)
        low, high = quantiles[int(place) : int(place) + 2]
        return min(most, max(1, int(low + rest * (high - low)) * self.most_tokens // MOST_TOKENS["cuda"]))

    def half(self) -> str:
        """bfloat16 twice as often as float16."""
        return self.rng.choice(["bfloat16", "bfloat16", "float16"])

    def layout(self) -> str:
        """How a weight lies in memory: TN, as `nn.Linear` keeps it, twice as often as NN."""
        return self.rng.choice(["TN", "TN", "NN"])


Draw = Callable[[Source], "Problem | None"]  # None: this model has no such layer


@cache
def models() -> list[Model]:
    """The 24 models of `models.csv`."""
    with MODELS.open(newline="") as file:
        return [
            Model(row.pop("model"), **{name: int(size or 0) for name, size in row.items()})
            for row in csv.DictReader(file)
        ]


def problems(name: str, draw: Draw, count: int, seed: int, device: str) -> list[Problem]:
    """`count` different problems of the op `name`, or fewer if there are not so many. The same seed gives the same problems.

    `device` is "cuda" or "cpu"; a CPU gets fewer tokens and narrower layers."""
    rng = random.Random(f"{name} {seed} {device}")
    of = models() if device == "cuda" else [model.narrowed(CPU_FACTOR) for model in models()]
    found: dict[str, Problem] = {}
    for _ in range(TRIES * count):
        if len(found) == count:
            break
        if problem := draw(Source(rng, rng.choice(of), MOST_TOKENS[device])):
            found.setdefault(repr(problem), problem)
    return list(found.values())


# How the problems of our ops are drawn.


def linear_layers(model: Model) -> list[tuple[int, int]]:
    """(N, K) of the linear layers: q, k and v as one, the output of attention, gate and up as one, up, down; logits last."""
    attention = model.heads * model.head_dim
    layers = [(attention + 2 * model.kv_heads * model.head_dim, model.hidden), (model.hidden, attention)]
    if ffn := model.ffn:
        layers += [(2 * ffn, model.hidden), (ffn, model.hidden), (model.hidden, ffn)]
    return [*layers, (model.vocab, model.hidden)]


def _layer(source: Source) -> tuple[int, int, int]:
    """(M, N, K) of a linear layer."""
    layers = linear_layers(source.model)
    (n, k), logits = source.rng.choice(layers), layers[-1]
    return source.tokens(min(MOST_LOGITS, source.most_tokens) if (n, k) == logits else None), n, k


def product(source: Source) -> Problem:
    """A linear layer."""
    m, n, k = _layer(source)
    return Problem(source.half(), {"m": m, "n": n, "k": k}, {"layout": source.layout()})


def quantised_product(source: Source) -> Problem | None:
    """A linear layer with weights in 4 or 8 bits. Half of them are int4 in groups of 128, the others fp8, with x in fp8 too, or
    two formats of GGUF."""
    m, n, k = _layer(source)
    form = source.rng.choice(["int4_g128"] * 4 + ["fp8_fp8"] * 2 + ["q4_k", "q8_0"])
    if n % 16 or k % 256:
        return None
    accumulate = "promoted" if form == "fp8_fp8" else "float32"
    return Problem("bfloat16", {"m": m, "n": n, "k": k}, {"format": form, "accumulate": accumulate})


def first_product(source: Source) -> Problem | None:
    """The first product of a feed-forward layer, with its bias or gate."""
    if not (ffn := source.model.ffn):
        return None
    shape = {"m": source.tokens(), "n": ffn, "k": source.model.hidden}
    return Problem(source.half(), shape, {"layout": source.layout()})


def gated(source: Source) -> Problem | None:
    """The gate and the first product of a feed-forward layer."""
    problem = first_product(source)
    return problem and replace(problem, params=problem.params | {"gate": "swiglu"})


def experts(source: Source) -> Problem | None:
    """The experts of a layer, for the tokens of a step, with routing as uneven as measured in models, or even."""
    model = source.model
    if not model.experts:
        return None
    sizes = {"experts": model.experts, "k": model.experts_per_token, "hidden": model.hidden, "ffn": model.expert_ffn}
    return Problem("bfloat16", {"tokens": source.tokens()} | sizes, {"routing": source.rng.choice(["uniform", "zipf"])})


def hidden_rows(source: Source) -> Problem:
    """Rows as wide as the model."""
    return Problem(source.half(), {"tokens": source.tokens(), "hidden": source.model.hidden})


def head_or_hidden_rows(source: Source) -> Problem:
    """Rows as wide as the model, or one time of four as wide as a head, for each head of each token."""
    if source.rng.random() < 0.25:
        model = source.model
        return Problem(source.half(), {"tokens": source.tokens() * model.heads, "hidden": model.head_dim})
    return hidden_rows(source)


def ffn_rows(source: Source) -> Problem:
    """Rows as wide as a feed-forward layer, or an expert of one."""
    model = source.model
    return Problem(source.half(), {"tokens": source.tokens(), "hidden": model.ffn or model.expert_ffn})


def scores_or_logits(source: Source) -> Problem:
    """Logits over the vocabulary, or scores of attention over as many keys as a request has tokens."""
    if source.rng.random() < 0.5:
        shape = {"rows": source.tokens(min(MOST_LOGITS, source.most_tokens)), "n": source.model.vocab}
    else:
        shape = {"rows": source.tokens(), "n": source.tokens()}
    return Problem(source.half(), shape)


def prompts(source: Source) -> Problem | None:
    """Causal attention over a batch of prompts. Together these have at most as many tokens as a step."""
    model = source.model
    if model.head_dim not in PREFILLED:
        return None
    length = source.prompt(source.most_tokens)
    batch = source.log_uniform(max(1, source.most_tokens // length))
    heads = {"heads": model.heads, "kv_heads": model.kv_heads, "head_dim": model.head_dim}
    if v_dim := V_DIM.get(model.head_dim):
        heads["v_dim"] = v_dim
    return Problem(source.half(), {"batch": batch, "seq_q": length, "seq_kv": length} | heads)


def decoding(source: Source) -> Problem | None:
    """Attention of one new token a request over its cache, in pages of 16 two times of three."""
    model = source.model
    if model.head_dim not in DECODED:
        return None
    longest = max(16, source.prompt(4 * source.most_tokens))
    batch = source.log_uniform(min(256, max(1, 64 * source.most_tokens // longest)))
    heads = {"heads": model.heads, "kv_heads": model.kv_heads, "head_dim": model.head_dim}
    page, lengths = source.rng.choice(["16", "16", "none"]), source.rng.choice(["full", "uniform:1"])
    shape = {"batch": batch, "new": 1, "longest": longest} | heads
    return Problem(source.half(), shape, {"page": page, "lengths": lengths})
