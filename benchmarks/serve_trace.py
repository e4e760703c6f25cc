"""How many tokens a second does the serving loop generate, and how long do its users wait?

    python benchmarks/serve_trace.py TRACE [--requests 2000] [--rate 3] [--policy continuous batch_by_batch]

TRACE is a CSV file of requests with the columns TIMESTAMP, ContextTokens and GeneratedTokens, as the Azure LLM inference traces
of 2023 have them (CC BY 4.0; Patel et al., Splitwise: efficient generative LLM inference using phase splitting, ISCA 2024).
A request has a random prompt of its length, and generates as many tokens as the trace says.

Each policy of batching (`minfer.models.serve.POLICIES`) gets the same requests. First, all of them wait at time 0. The loop's
tokens a second are compared with those of its steps alone: the tokens over the sum of the device's times of all steps. This sum
leaves out choosing tokens, planning, and copies from the host. With `--rate R`, requests then come at R a second, at equal
intervals. The delay of the first token and the times between tokens are reported.
The results are written to benchmarks/results/serve-trace-<device>.parquet."""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import math
import random
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.rows import write
from minfer.bench import device as devices
from minfer.models import weights
from minfer.models.batch import Piece, batch, bucket
from minfer.models.named import NAMED, named
from minfer.models.serve import POLICIES, Engine, Request, Sampling
from minfer.models.sources import Random

COLUMNS = ("ContextTokens", "GeneratedTokens")
PAGE = 64


@dataclass(frozen=True)
class Asked:
    """A request of a trace: tokens of its prompt, and tokens to generate."""

    prompt: int
    generated: int


def read(path: Path, count: int) -> list[Asked]:
    """The first `count` requests of a trace. Raises SystemExit for a file that is no trace."""
    try:
        file = io.StringIO(path.read_text(encoding="utf-8-sig"), newline="")
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} cannot be read as a trace: {getattr(error, 'strerror', '') or error}") from None
    with file:
        rows = csv.DictReader(file)
        if missing := [name for name in COLUMNS if name not in (rows.fieldnames or ())]:
            raise SystemExit(f"{path} has no column {missing[0]}; a trace has {' and '.join(COLUMNS)}")
        try:
            found = [
                Asked(*(max(1, int(row[name])) for name in COLUMNS)) for row, _ in zip(rows, range(count), strict=False)
            ]
        except (ValueError, TypeError):
            raise SystemExit(
                f"{path} has a line that is no request; {' and '.join(COLUMNS)} are whole numbers"
            ) from None
    if not found:
        raise SystemExit(f"{path} has no requests")
    return found


class Clocked:
    """Calls a model's forward pass, and keeps the device's time of each call. It takes the place of an engine's `graphs` or of
    its decoder's `forward`. A call of `forward` is not counted if it is made during a call of the graphs, `within`, because it
    then captures a step's graph."""

    def __init__(self, function: Any, device: torch.device, within: Clocked | None = None) -> None:
        self.function, self.device, self.within = function, device, within
        self.spans, self.running = list[tuple[Any, Any]](), False

    def __call__(self, *given: Any) -> torch.Tensor:
        if self.within is not None and self.within.running:
            return self.function(*given)
        self.running = True
        begin, found, end = self._mark(), self.function(*given), self._mark()
        self.running = False
        self.spans.append((begin, end))
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def _mark(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> float:
        if self.device.type == "cpu":
            return sum(end - begin for begin, end in self.spans)
        torch.cuda.synchronize(self.device)
        return sum(begin.elapsed_time(end) for begin, end in self.spans) * 1e-3


def submit(engine: Engine, asked: Asked, drawn: random.Random) -> Request:
    prompt = [drawn.randrange(engine.decoder.config.vocab) for _ in range(asked.prompt)]
    request = engine.submit(prompt, Sampling(max_tokens=asked.generated, stop=()))
    if request.error:
        raise SystemExit(request.error)
    return request


def warm_up(engine: Engine, trace: list[Asked]) -> None:
    """Compile kernels, and capture the graph of each bucket that a step of the trace can need."""
    step = min(engine.chunk, 2 * PAGE)
    submit(engine, Asked(step, 2), random.Random(2))
    engine.run()
    if engine.graphs is None:
        return
    widest = bucket(max(-(-(asked.prompt + asked.generated) // PAGE) for asked in trace))
    for rows, width in itertools.product(doublings(bucket(engine.most)), doublings(widest)):
        pages = list(range(min(width, engine.pages.count)))
        pieces = [Piece([0], len(pages) * PAGE - 1, pages)] * min(rows, engine.most)
        engine.graphs(batch(pieces, PAGE, engine.decoder.device, pad=True))


def doublings(most: int) -> list[int]:
    """The powers of two from 1 to `most`."""
    return [1 << bit for bit in range(most.bit_length())]


def serve_all(engine: Engine, trace: list[Asked], device: torch.device) -> dict[str, Any]:
    """Serve requests that all wait at time 0."""
    drawn = random.Random(0)
    requests = [submit(engine, asked, drawn) for asked in trace]
    graphs = Clocked(engine.graphs, device)
    forward = Clocked(engine.decoder.forward, device, within=graphs)
    with ExitStack() as stack:
        if engine.graphs is not None:
            stack.enter_context(mock.patch.object(engine, "graphs", graphs))
        stack.enter_context(mock.patch.object(engine.decoder, "forward", forward))
        begin = time.perf_counter()
        engine.run()
        seconds = time.perf_counter() - begin
    steps_s = graphs.seconds() + forward.seconds()
    generated, prompts = sum(len(request.tokens) for request in requests), sum(asked.prompt for asked in trace)
    return {
        "case": "all at 0", "seconds": seconds, "steps_s": steps_s, "steps": len(graphs.spans) + len(forward.spans),
        "decode_steps": len(graphs.spans), "generated": generated, "prompt_tokens": prompts,
        "tokens_per_s": generated / seconds, "steps_tokens_per_s": generated / steps_s,
        "preempted": sum(request.preempted for request in requests),
    }  # fmt: skip


@dataclass
class Shown:
    """What a user has seen of a request: how many tokens, and when the last one came, or before the first the request."""

    request: Request
    last: float
    tokens: int = 0


def serve_at(engine: Engine, trace: list[Asked], rate: float) -> dict[str, Any]:
    """Serve requests that come at `rate` a second, evenly."""
    drawn, open_requests, first, between = random.Random(1), list[Shown](), list[float](), list[float]()
    sent = generated = 0
    begin = time.perf_counter()
    while sent < len(trace) or open_requests:
        now = time.perf_counter() - begin
        while sent < len(trace) and sent / rate <= now:
            open_requests.append(Shown(submit(engine, trace[sent], drawn), sent / rate))
            sent += 1
        if not engine.step():
            time.sleep(1e-4)
        now = time.perf_counter() - begin
        for each in open_requests:
            if (count := len(each.request.tokens)) > each.tokens:
                (between if each.tokens else first).append(now - each.last)
                generated += count - each.tokens
                each.tokens, each.last = count, now
        open_requests = [each for each in open_requests if not each.request.done]
    seconds = time.perf_counter() - begin
    row: dict[str, Any] = {"case": f"{rate:g} a second", "rate": rate, "seconds": seconds, "generated": generated}
    for name, values in (("first", first), ("between", between)):
        row |= {f"{name}_p{q}_ms": float(np.percentile(values, q)) * 1e3 for q in (50, 99) if values}
    return row


def whole(text: str) -> int:
    """An argument that is an int from 1."""
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def above_0(text: str) -> float:
    """An argument that is a finite number above 0."""
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--model", default="llama-3.1-8b", choices=NAMED)
    parser.add_argument("--requests", type=whole, default=2000)
    parser.add_argument(
        "--rate", type=above_0, nargs="*", default=[], help="requests a second, for the delays of tokens"
    )
    parser.add_argument("--of", type=whole, default=300, help="how many requests come at these rates")
    parser.add_argument(
        "--policy", nargs="*", default=["continuous"], choices=POLICIES, help="which requests a step serves"
    )
    parser.add_argument("--pages", type=int, default=6000, help=f"of {PAGE} tokens, in the cache")
    parser.add_argument("--most", type=int, default=128, help="requests in a step")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens in a step")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dry", action="store_true", help="write nothing")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and (why := devices.no_gpu()):
        sys.exit(f"serve_trace.py needs a GPU, or --device cpu: {why}")
    device, trace = devices.pick(given.device), read(given.trace, given.requests)
    decoder = weights.build(named(given.model), Random(), device, torch.bfloat16)
    setting = {"pages": given.pages, "page": PAGE, "chunk": given.chunk, "most": given.most, "share": False}
    try:
        engine = Engine(decoder, **setting)
    except ValueError as error:
        sys.exit(f"serve_trace.py: {error}")
    warm_up(engine, trace)
    about = {"model": given.model, "trace": given.trace.stem, "requests": len(trace)} | setting
    some, rows = trace[: given.of], list[dict[str, Any]]()
    for policy in given.policy:
        engine.policy = policy
        of = about | {"policy": policy}
        rows.append(of | serve_all(engine, trace, device))
        rows += [of | serve_at(engine, some, rate) | {"requests": len(some)} for rate in given.rate]
    for row in rows:
        print({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()})
    if not given.dry:
        write("serve-trace", rows, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
