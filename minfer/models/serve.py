"""A loop that serves requests. Each step computes one token of every request that is generating, and a chunk of prompts.

Requests are served in the order in which they came. When no page is free, the youngest request gives its pages back and is
computed again later. Its tokens stay the same, because the sampler's random numbers depend only on the request's seed and on
how many tokens it has."""

from __future__ import annotations

import math
import random
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from minfer.functional.pages import is_power_of_two
from minfer.models.batch import Batch, Piece, batch, on_device
from minfer.models.batch import cache as new_cache
from minfer.models.graphs import Graphs, can_be_captured
from minfer.models.model import Decoder
from minfer.models.pages import Pages

# continuous: a step computes one token of each request that is past its prompt, and chunks of the prompts of others.
# prompts_first: a step computes either prompts or single tokens, and prompts come first.
# batch_by_batch: requests that began together are served to their end before the next ones begin.
POLICIES = ("continuous", "prompts_first", "batch_by_batch")
UNKNOWN = 0  # stands for a token that the host does not know yet


class RequestError(ValueError):
    """A request cannot be served; the message is one sentence."""


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen. `temperature`, `top_k`, `top_p` and `min_p` are those of `minfer.sample`; a
    temperature of 0 takes the likeliest token. `stop` has the ids of tokens that end the answer and are not part of it; None:
    the model's."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[int, ...] | None = None

    def mistake(self) -> str:
        """What is out of range, in a sentence, or nothing."""
        numbers = {name: value for name, value in vars(self).items() if type(value) in (int, float)}
        whole = {name: value for name, value in numbers.items() if type(value) is int}
        ranges = {
            "max_tokens": (whole.get("max_tokens", 0) >= 1, "an int from 1"),
            "temperature": (0 <= numbers.get("temperature", -1) < math.inf, "a finite number from 0"),
            "top_k": (whole.get("top_k", -1) >= 0, "an int from 0"),
            "top_p": (0 < numbers.get("top_p", 0) <= 1, "a number above 0 and at most 1"),
            "min_p": (0 <= numbers.get("min_p", -1) <= 1, "a number from 0 to 1"),
            "seed": ("seed" in whole, "an int"),
            "stop": (
                self.stop is None
                or (isinstance(self.stop, tuple | list | set | frozenset) and all(type(x) is int for x in self.stop)),
                "None or a tuple of ids, Python ints",
            ),
        }
        for name, (right, takes) in ranges.items():
            if not right:
                return f"a request takes {name} as {takes}, got {getattr(self, name)!r}"
        return ""


@dataclass(eq=False)
class Request:
    """A prompt, and the tokens generated for it so far. `error` is a sentence if the request was refused."""

    prompt: tuple[int, ...]
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    done: bool = False
    error: str = ""
    preempted: int = 0  # how often it gave its pages back
    reused: int = 0  # tokens whose keys were found in the cache
    pages: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # of its full pages
    computed: int = 0  # tokens whose keys are in the cache
    text: list[int] = field(default_factory=list)  # the prompt and the generated tokens

    def begin(self) -> None:
        """Start over with an empty cache: keep the tokens, and skip the random numbers that they used."""
        self.text = [*self.prompt, *self.tokens]
        self.pages, self.keys, self.computed = [], [], 0
        self.random = random.Random(self.sampling.seed)
        for _ in self.tokens:
            self.random.getrandbits(24)

    @property
    def left(self) -> int:
        """Tokens to compute before the next one can be chosen."""
        return len(self.text) - self.computed


@dataclass
class Step:
    """How many tokens each request computes in a step, and the step's tensors; `replayed`: by a graph."""

    plan: list[tuple[Request, int]]
    batch: Batch
    replayed: bool


class Engine:
    """Serves requests with a decoder and a cache of `pages` pages of `page` tokens, a power of two. A step computes at most
    `chunk` tokens, of at most `most` requests, which a policy of POLICIES chooses. `share` lets requests use the pages of
    others that began with the same text. `graphs` replays steps without prompts as CUDA graphs: by default on a GPU, where that
    is possible. Its methods may be called from several threads, of which one computes a step while the others wait. Raises
    ValueError for sizes that do not fit."""

    def __init__(
        self,
        decoder: Decoder,
        pages: int,
        page: int = 64,
        chunk: int = 512,
        most: int = 64,
        share: bool = True,
        graphs: bool | None = None,
        policy: str = "continuous",
    ) -> None:
        if not is_power_of_two(page):
            raise ValueError(f"an engine takes pages whose number of tokens is a power of two, got {page}")
        if pages < 1 or not 1 <= most <= chunk:
            raise ValueError(f"an engine takes pages from 1 and most from 1 to chunk, got {pages=}, {most=}, {chunk=}")
        if policy not in POLICIES:
            raise ValueError(f"an engine takes a policy of {', '.join(POLICIES)}, got {policy!r}")
        self.decoder, self.chunk, self.most, self.policy = decoder, chunk, most, policy
        self.pages = Pages(pages, page, share)
        self.cache = new_cache(decoder.config, pages, page, decoder.device, decoder.dtype)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.requests: dict[Request, None] = {}  # requests that have not ended, oldest first
        self.longest = min(decoder.config.longest, pages * page)
        self.next: Step | None = None  # made while the device computes
        self.lock = threading.RLock()  # a thread holds it while it changes what a step changes
        self.interrupted = False  # whether such a change has begun and not ended
        self.graphs: Graphs | None = None
        if graphs if graphs is not None else decoder.device.type == "cuda" and can_be_captured(decoder):
            self.graphs = Graphs(decoder, self.cache)

    def submit(self, prompt: Sequence[int], sampling: Sampling = Sampling()) -> Request:
        """Add a request. One that cannot be served is returned done, with a sentence as its error."""
        request = Request(tuple(prompt), sampling)
        request.error = self._mistake(request)
        request.done = bool(request.error)
        if not request.done:
            request.begin()
            with self.lock:
                before, self.interrupted = self.interrupted, True
                self.requests[request] = None
                self.waiting.append(request)
                self.next = None  # it may be part of the next step
                self.interrupted = before
        return request

    def _mistake(self, request: Request) -> str:
        vocab, count = self.decoder.config.vocab, len(request.prompt)
        wrong = [token for token in request.prompt if type(token) is not int or not 0 <= token < vocab]
        if not count or wrong:
            got = f"{wrong[0]!r}" if wrong else "none"
            return f"a request takes a prompt of token ids, Python ints from 0 to {vocab - 1}, got {got}"
        if mistake := request.sampling.mistake():
            return mistake
        if count + request.sampling.max_tokens > self.longest:
            return (
                f"a request takes prompt and max_tokens of at most {self.longest} tokens together, because model and cache "
                f"have room for no more, got {count} and {request.sampling.max_tokens}"
            )
        return ""

    def run(self) -> None:
        """Serve all requests to their end."""
        while self.step():
            pass

    def stream(self, request: Request) -> Iterator[int]:
        """The request's tokens as they come, while all other requests are served, too. A caller that stops listening ends the
        request. Raises RequestError where it was refused."""
        sent = 0
        try:
            while True:
                done = request.done  # read first: another thread may add tokens and end the request meanwhile
                yield from request.tokens[sent : (sent := len(request.tokens))]
                if done:
                    break
                self.step()
        finally:
            self.cancel(request)
        if request.error:
            raise RequestError(request.error)

    def cancel(self, request: Request) -> None:
        """End a request, if it has not ended, with the tokens that it has."""
        with self.lock:
            before, self.interrupted = self.interrupted, True
            if before:
                pass  # the next step leaves it out
            elif request in self.running:
                self._stop(request)
                self.next = None
            elif request in self.waiting:
                self.waiting.remove(request)
            self._end(request)
            self.interrupted = before

    def step(self) -> bool:
        """Compute the next tokens, and choose one for each request whose text is computed. False where nothing is left.

        The next step is planned, and its tensors are made, while the device computes this one. After an error, or Ctrl-C, the
        requests keep the tokens that they have, and the next call goes on from there."""
        with self.lock:
            if self.interrupted:
                self._begin_again()
            self.interrupted = True
            found = self._step()
            self.interrupted = False
            return found

    def _begin_again(self) -> None:
        """Recover from a change that stopped at an unknown point: empty the cache, and let all requests wait again."""
        self.pages = Pages(self.pages.count, self.pages.page, self.pages.share)
        self.running, self.next = [], None
        for request in list(self.requests):
            request.begin()
            if request.done or len(request.tokens) == request.sampling.max_tokens:
                self._end(request)
        self.waiting = deque(self.requests)

    def _end(self, request: Request) -> None:
        request.done = True
        self.requests.pop(request, None)

    def _step(self) -> bool:
        step, self.next = self.next or self._prepare(self._plan()), None
        if step is None:
            return False
        if self.graphs is not None and step.replayed:
            logits = self.graphs(step.batch)
        else:
            logits = self.decoder.forward(step.batch, self.cache)
        ready = []
        for row, (request, count) in enumerate(step.plan):
            request.computed += count
            self._keep_pages(request)
            if not request.left:
                ready.append((row, request))
        if ready:
            tokens = self._choose(logits, ready)
            self._look_ahead([request for _, request in ready], tokens)
            self._take([request for _, request in ready], tokens.tolist())
        return True

    def _prepare(self, plan: list[tuple[Request, int]]) -> Step | None:
        """The tensors of a step that computes so many tokens of each request."""
        if not plan:
            return None
        plan.sort(key=lambda part: part[1] > 1)
        pieces = [Piece(r.text[r.computed : r.computed + count], r.computed, r.pages) for r, count in plan]
        replayed = self.graphs is not None and plan[-1][1] == 1
        return Step(plan, batch(pieces, self.pages.page, self.decoder.device, pad=self.graphs is not None), replayed)

    def _look_ahead(self, ready: list[Request], tokens: torch.Tensor) -> None:
        """Prepare the next step before the host knows the tokens of this one, which are on the device. Nothing is prepared if a
        request would have to give its pages back. If a token of this step ends an answer, `_take` drops the prepared step, and
        the requests keep the pages that they got for it."""
        for request in ready:
            request.text.append(UNKNOWN)
            if len(request.tokens) + 1 == request.sampling.max_tokens:
                self._stop(request)
        if not self._have_room():
            return
        self.next = self._prepare(self._plan())
        place = {request: i for i, request in enumerate(ready)}
        plan = self.next.plan if self.next else []
        rows = [(row, place[request]) for row, (request, _) in enumerate(plan) if request in place]
        if self.next and rows:  # they have one token each, so they come first, and a row is the place of its token
            to, of = on_device(torch.tensor(rows).t().contiguous(), tokens.device)
            self.next.batch.ids.index_copy_(0, to, tokens[of].long())

    def _have_room(self) -> bool:
        """Whether there are pages for all tokens that the running requests can compute in the next step."""
        page, budget = self.pages.page, self.chunk
        wanted = (-(-(r.computed + min(r.left, budget)) // page) - len(r.pages) for r in self.running)
        return sum(max(0, each) for each in wanted) <= self.pages.free

    def _take(self, requests: list[Request], tokens: list[int]) -> None:
        """Give each request its token. Those that have all their tokens end."""
        for request, token in zip(requests, tokens, strict=True):
            request.text.pop()  # UNKNOWN
            stop = self.decoder.config.stop if request.sampling.stop is None else request.sampling.stop
            if token not in stop:
                request.tokens.append(token)
                request.text.append(token)
            if token in stop or len(request.tokens) == request.sampling.max_tokens:
                self._end(request)
                if request in self.running:
                    self._stop(request)
                    self.next = None

    def _plan(self) -> list[tuple[Request, int]]:
        """How many tokens each request computes in the next step. The requests have pages for these tokens."""
        plan: dict[Request, int] = {}
        budget = self.chunk
        for request in sorted(self.running, key=lambda r: r.left > 1):  # those that generate come first; a stable sort
            count = min(request.left, budget)
            if request in self.running and count and self._make_room(request, count, plan):
                plan[request] = count
                budget -= count
        joins = self.policy != "batch_by_batch" or not self.running
        while joins and self.waiting and budget and len(self.running) < self.most and self._admit(self.waiting[0]):
            request = self.waiting.popleft()
            plan[request] = min(request.left, budget)
            budget -= plan[request]
        prompts = [part for part in plan.items() if part[0].left > 1]
        return prompts if prompts and self.policy == "prompts_first" else list(plan.items())

    def _admit(self, request: Request) -> bool:
        """Start a request if there are pages for all of its text and the next token."""
        text, page = request.text, self.pages.page
        keys = self.pages.keys_of(text[:-1])  # the last token is computed in any case: its logits are needed
        found = self.pages.find(keys)
        needed = len(text) // page + 1 - len(found)
        if needed > self.pages.free:
            self.pages.release(found)
            return False
        request.pages = found + [self.pages.take() for _ in range(needed)]
        request.keys, request.computed = keys[: len(found)], len(found) * page
        request.reused += request.computed
        self.running.append(request)
        return True

    def _make_room(self, request: Request, count: int, plan: dict[Request, int]) -> bool:
        """Get pages for the next tokens of a request. While none is free, the youngest request gives its pages back. Returns
        False if that is the request itself."""
        while len(request.pages) * self.pages.page < request.computed + count:
            if self.pages.free:
                request.pages.append(self.pages.take())
                continue
            youngest = self.running[-1]
            plan.pop(youngest, None)
            self._stop(youngest)
            youngest.preempted += 1
            self.waiting.appendleft(youngest)
            if youngest is request:
                return False
        return True

    def _stop(self, request: Request) -> None:
        self.running.remove(request)
        self.pages.release(request.pages)
        request.pages, request.keys, request.computed = [], [], 0

    def _keep_pages(self, request: Request) -> None:
        known = len(request.keys)
        if not self.pages.share or request.computed // self.pages.page == known:
            return
        request.keys = self.pages.keys_of(request.text[: request.computed], request.keys)
        for number, key in zip(request.pages[known:], request.keys[known:], strict=False):
            self.pages.keep(number, key)

    def _choose(self, logits: torch.Tensor, ready: list[tuple[int, Request]]) -> torch.Tensor:
        """A token for each request, by its row of logits: one launch, whatever their settings are."""
        settings = [request.sampling for _, request in ready]
        draws = [r.random.getrandbits(24) / 2**24 if r.sampling.temperature else 0.0 for _, r in ready]
        floats = [draws, *([getattr(x, name) for x in settings] for name in ("temperature", "top_p", "min_p"))]
        u, temperature, top_p, min_p = on_device(torch.tensor(floats, dtype=torch.float32), logits.device)
        rows = [row for row, _ in ready]
        whole = [rows, [min(x.top_k, logits.shape[1]) for x in settings]]
        places, top_k = on_device(torch.tensor(whole, dtype=torch.int32), logits.device)
        chosen = logits[: len(rows)] if rows == list(range(len(rows))) else logits[places]
        found: torch.Tensor = torch.ops.minfer.sample_rows.default(chosen, u, temperature, top_k, top_p, min_p)
        return found
