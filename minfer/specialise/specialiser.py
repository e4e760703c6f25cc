"""Counts what is called, has variants compiled for what is called often, and calls them."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from minfer import build
from minfer.bench import device as devices
from minfer.bench.operands import Operands
from minfer.build import cache
from minfer.build.errors import BuildError
from minfer.ops import get
from minfer.specialise.background import Background
from minfer.specialise.buckets import Buckets, Key, Size, Span, exact
from minfer.specialise.policy import MOST_SEEN, Ledger, Policy
from minfer.specialise.recipe import Recipe
from minfer.specialise.trial import Outcome, elsewhere, known

log = logging.getLogger("minfer.specialise")
MOST_SIZES = 1 << 12  # that the table remembers the function of, one by one
IDLE_S = 2.0  # after so long without a compile the background process ends, and gives its memory back
Function = Callable[..., Any]


class Table(dict[Size, Function]):
    """Size -> function. It is never changed but by remembering what it would find again; a new one takes its place."""

    def __init__(self, variants: Mapping[Key, Function], buckets: Buckets, fallback: Function) -> None:
        super().__init__()
        self.variants, self.buckets, self.fallback = variants, buckets, fallback

    def __missing__(self, size: Size) -> Function:
        found = self.variants.get(self.buckets(size), self.fallback)
        if len(self) < MOST_SIZES:
            self[size] = found
        return found


class Specialiser:
    """One op's variants in this process, for one device.

        sums = Specialiser(recipes.SEQ_SUM_CPP, Policy(threshold=500))
        sums.execute(x.shape[1], y, x, seqlens)

    `execute(size, *tensors, **scalars)` is all that a caller needs: it monitors, looks when the policy says so, and calls the
    variant or the generic kernel. `monitor(size)`, `check()` and `compile(key)` are its parts, for those who look themselves.
    What comes of a variant is logged under `minfer.specialise`, once for each: a warning where there is none to use.
    """

    def __init__(self, recipe: Recipe, policy: Policy | None = None, buckets: Buckets = exact) -> None:
        """Raises BuildError where the generic kernel does not compile."""
        for given, kind in ((recipe, Recipe), (policy or Policy(), Policy)):
            if not isinstance(given, kind):
                raise TypeError(f"a Specialiser takes a {kind.__name__}, got {given!r}")
        self._closed = self._said = self._moved = False
        self.recipe, self.policy, self.buckets = recipe, policy or Policy(), buckets
        self.device = devices.pick(recipe.device)
        self.arch = devices.arch(self.device)
        self.fallback = build.function(recipe.generic(), self.arch)
        self.outcomes: dict[Key, Outcome] = {}
        self._made: dict[Key, Function] = {}
        self._ledger = Ledger(self.policy, buckets)
        self._table = Table({}, buckets, self.fallback)
        self._seen: deque[Size] = deque(maxlen=MOST_SEEN)
        # `monitor(size)` counts a call: it is a method of C, and all else is done when somebody looks.
        self.monitor = self._seen.append
        self._every = self.policy.every_calls or MOST_SEEN + 1
        self._background = Background(recipe, self.policy.build_s)
        self._start_afresh()
        _all.add(self)

    def _start_afresh(self) -> None:
        """What no fork survives: the thread, its lock and its queue."""
        self._lock, self._queue = threading.Lock(), queue.SimpleQueue[Key | None]()
        self._futures: dict[Key, Future[Outcome]] = {}
        self._thread: threading.Thread | None = None
        self._looking = self._full = False
        if self.policy.every_s:
            self._wake()

    def execute(self, size: Size, *tensors: Any, **scalars: Any) -> Any:
        """Call the variant for a size, or the generic kernel, and count the call. What a variant is not for, such as another
        dtype, it refuses with an error before it writes anything; the generic kernel then serves this call."""
        self.monitor(size)
        if len(self._seen) >= self._every and not self._looking:
            self._looking = True
            self._queue.put(None)
            self._wake()
        function = self._table[size]
        try:
            return function(*tensors, **scalars)
        except (ValueError, RuntimeError):  # RuntimeError: a check in C++
            if function is self.fallback:
                raise
        return self.fallback(*tensors, **scalars)

    def function(self, size: Size) -> Function:
        """What `execute` would call first for a size now."""
        return self._table[size]

    def check(self) -> list[Key]:
        """Count what was monitored since the last look. Returns the keys that are worth a variant, each once, and again only
        where its trial was undecided, and no more than the policy's budget allows: give them to `compile`. Variants that must
        make room leave the table."""
        with self._lock:
            seen = [self._seen.popleft() for _ in range(len(self._seen))]
            try:
                self._ledger.count(seen)
            except Exception as error:  # before any of them was counted
                if not self._said:
                    log.warning("%s: calls of what has no bucket are not counted: %s", self.recipe.name, error)
                    self._said = True
                self._ledger.count(filter(self._is_size, seen))
            if self._full:
                return []
            wanted, again, drop = self._ledger.decide()
            if again or drop:
                self._replace()
            return wanted

    def _is_size(self, size: Any) -> bool:
        try:
            return bool({self.buckets(size)} and {size})  # both can be hashed
        except Exception:
            return False

    def compile(self, key: Key) -> Future[Outcome]:
        """Have a variant compiled and tried in the background, and taken into use if it is faster. Returns at once: after
        `close` a cancelled future. Raises TypeError for what is no key."""
        if not isinstance(key, tuple) or not all(isinstance(span, Span) for span in key):
            raise TypeError(f"a key is what buckets make of a size, such as exact(128), got {key!r}")
        with self._lock:
            if key not in self._futures and self._closed:
                stopped = Future[Outcome]()
                stopped.cancel()
                return stopped
            if key not in self._futures:
                self._futures[key] = Future()
                self._ledger.asked.add(key)
                self._ledger.live.add(key)
                self._ledger.pending.add(key)
                self._queue.put(key)
            future = self._futures[key]
        self._wake()
        return future

    def wait(self, seconds: float | None = None) -> list[Outcome]:
        """Wait for all that is being compiled. Raises TimeoutError after so many seconds."""
        end = None if seconds is None else time.monotonic() + seconds
        left = lambda: None if end is None else max(0.0, end - time.monotonic())
        return [future.result(left()) for future in list(self._futures.values())]

    @property
    def variants(self) -> list[Key]:
        """The keys whose variants are in use."""
        return list(self._table.variants)

    def held_bytes(self) -> int:
        """What the machine code of all variants takes that this process has loaded, in use or not."""
        return sum(self.recipe.held_bytes(key, self.arch) for key in list(self._made))

    def close(self) -> None:
        """Stop compiling. Variants stay in use."""
        self._closed = True
        stopped = [key for key, future in list(self._futures.items()) if not future.done() and future.cancel()]
        if stopped:
            named, others = self.recipe.named(stopped[0]), len(stopped) - 1
            these = (
                f"{named} and {others} more: stopped before they were" if others else f"{named}: stopped before it was"
            )
            log.warning("%s compiled; the next process does it", these)
        self._background.abandon()
        self._queue.put(None)

    # What the thread does.

    def _wake(self) -> None:
        with self._lock:  # of threads that call at once one starts it
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="minfer-specialise", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while not self._closed:
            running = self._background.running
            try:
                key = self._queue.get(timeout=IDLE_S if running else self.policy.every_s or None)
            except queue.Empty:
                key = None
                if running:
                    self._background.close()
                    continue
            if key is None:
                for wanted in self.check():
                    try:
                        self.compile(wanted)
                    except TypeError as error:  # the caller's own buckets made it
                        log.warning("%s: %s", self.recipe.name, error)
                self._looking = False
            else:
                self._settle(key)
        self._background.close()

    def _settle(self, key: Key) -> None:
        """Find out what comes of a variant, and use it if it is faster."""
        made = None
        try:
            outcome = self._outcome(key)
            if self._closed:
                return
            if outcome.faster:
                made = self._loaded(key)
        except Exception as error:  # whatever it is, the generic kernel still serves
            outcome = Outcome("failed", str(error))
        with self._lock:
            future = self._futures[key]
            if outcome.status == "undecided":
                self._ledger.postpone(key)
                del self._futures[key]  # who asks again gets a new one
            else:
                self._ledger.settle(key, made is not None)
            self.outcomes[key] = outcome
            if made is not None:
                self._made[key] = made
                self._replace()
        self._tell(key, outcome)
        with suppress(InvalidStateError):  # somebody cancelled it meanwhile
            future.set_result(outcome)

    def _outcome(self, key: Key) -> Outcome:
        if self._full:
            return Outcome("full")
        try:
            self.recipe.case(key)
        except ValueError as error:
            return Outcome("failed", str(error))
        try:
            if found := known(self.recipe, key, self.arch, devices.name(self.device)):
                return found
            if not self._moved and (others := elsewhere(self.recipe, key, devices.name(self.device))):
                self._moved = True
                here, there = devices.name(self.device), " and ".join(others)
                log.warning(
                    "%s: verdicts from %s are not used on %s; variants are tried again", self.recipe.name, there, here
                )
        except (BuildError, OSError):
            pass  # the background process says it
        return self._background.outcome(key)

    def _loaded(self, key: Key) -> Function:
        """The variant, called once here, so that its first call elsewhere loads nothing."""
        function, case = self.recipe.function(key, self.arch), self.recipe.case(key)
        op = get(self.recipe.op)
        function(*Operands(op, case, 0, "normal", self.device).arguments, **op.call(case))
        return function

    def _replace(self) -> None:
        """A new table, in one assignment: who is in `execute` has the old one or the new one."""
        variants = {key: self._made[key] for key in self._ledger.live if key in self._made}
        self._table = Table(variants, self.buckets, self.fallback)

    def _tell(self, key: Key, outcome: Outcome) -> None:
        named, generic = self.recipe.named(key), self.recipe.fallback
        if outcome.faster:
            log.info("%s: %.2f times as fast as %s, in use", named, outcome.speedup, generic)
        elif outcome.status == "not faster":
            how = f"{outcome.speedup:.2f} times, {outcome.low:.2f} to {outcome.high:.2f}"
            log.warning("%s: not faster than %s (%s), not used", named, generic, how)
        elif outcome.status == "undecided":
            log.info("%s: not decided, %s goes on, tried again after more calls: %s", named, generic, outcome.why)
        elif outcome.status == "failed":
            log.warning("%s: not used, %s goes on: %s", named, generic, outcome.why)
        elif not self._full:
            self._full = True
            folder = cache.root()
            log.warning("%s and all others: not compiled, %s goes on: %s: %s", named, generic, folder, outcome.why)

    def _after_fork(self) -> None:
        """In a child: installed variants stay in use. Compiles that had begun are the parent's; the child may ask for them
        again. On a GPU each call in a child raises an error."""
        for key in self._ledger.pending:
            self._ledger.asked.discard(key)
            self._ledger.live.discard(key)
        self._ledger.pending.clear()
        self._background.forget()
        self._seen.clear()
        if self.device.type == "cuda":
            self._closed, self.fallback = True, _without_context
            self._made.clear()
            self._replace()
        self._start_afresh()


def _without_context(*tensors: Any, **scalars: Any) -> None:
    raise RuntimeError(
        "minfer.specialise: a forked process cannot use the CUDA context of its parent; start it with multiprocessing's "
        "method spawn, and make a Specialiser there"
    )


_all: weakref.WeakSet[Specialiser] = weakref.WeakSet()


def _close_all() -> None:
    for each in list(_all):
        each.close()


def _forked() -> None:
    for each in list(_all):
        each._after_fork()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forked)
