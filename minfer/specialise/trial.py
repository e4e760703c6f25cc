"""Is a variant worth it? Compiled, verified as every kernel is, and timed in pairs against the kernel that serves every size.

What came of it is kept in the build cache, for this device and exactly these sources, so that the next process need not ask.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from minfer import build
from minfer.bench import RULES
from minfer.bench import device as devices
from minfer.bench.integrity import Dishonest
from minfer.bench.measure import Bench
from minfer.bench.stats import Comparison, compare_blocks
from minfer.bench.timing import Timing
from minfer.bench.verify import WrongResult, verify
from minfer.build.errors import DISK_FULL, BuildError
from minfer.fingerprint import fingerprint
from minfer.ops import get
from minfer.specialise import llvm
from minfer.specialise.buckets import Key
from minfer.specialise.recipe import Recipe, write

BLOCK_S = 0.1
LEAST_GAIN = 0.02  # a smaller one is not worth a variant's memory
# Again where the generic kernel is so much faster or slower than its own duplicate. On a busy machine, whose threads wait for
# each other, a kernel of one thread then seems faster than one of two that it is slower than.
REPEATS, RESTLESS = 5, 0.05
SEED = 20


@dataclass(frozen=True)
class Outcome:
    """What came of a variant. Seconds of the compile and of the trial; microseconds of a call at the key's largest sizes."""

    # "faster", "not faster", "failed", "full": there is no room for what the compiler writes, or "undecided": the machine was
    # too busy to tell, and the variant may be tried again
    status: str
    why: str = ""
    compile_s: float = 0.0
    trial_s: float = 0.0
    variant_us: float = 0.0
    generic_us: float = 0.0
    speedup: float = 0.0
    low: float = 0.0
    high: float = 0.0

    @property
    def faster(self) -> bool:
        return self.status == "faster"


def record(recipe: Recipe, key: Key, arch: str, device: str) -> Path:
    """Where the outcome of a trial is or would be. Another GPU, compiler, source or measuring rule has another place."""
    kernel = recipe.kernel(key)
    about = [fingerprint(each, arch, RULES) for each in (kernel, recipe.generic())]
    about.append(llvm.object_file(kernel.source).stem if recipe.backend == "llvm" else "")
    threads = torch.get_num_threads() if recipe.device == "cpu" else 0
    about.append(repr((recipe.case(key).key, device, arch, threads)))
    digest = hashlib.sha256("|".join(about).encode()).hexdigest()[:16]
    return kernel.source.with_name(f"{kernel.source.stem}_{digest}.json")


def known(recipe: Recipe, key: Key, arch: str, device: str) -> Outcome | None:
    """What a trial of exactly this variant on such a device said, in whatever process it was."""
    try:
        found = json.loads(record(recipe, key, arch, device).read_text())
        del found["device"]
        return Outcome(**found)
    except (OSError, ValueError, TypeError, KeyError):  # none yet, or half of one
        return None


def elsewhere(recipe: Recipe, key: Key, device: str) -> list[str]:
    """The other devices on which a variant of exactly this source was tried."""
    source, found = recipe.kernel(key).source, set()
    for path in source.parent.glob(f"{source.stem}_*.json"):
        with suppress(OSError, ValueError, TypeError, KeyError):
            found.add(str(json.loads(path.read_text())["device"]))
    return sorted(found - {device})


def tried(recipe: Recipe, key: Key, say: Callable[..., None] = lambda **phase: None) -> Outcome:
    """Compile a variant and try it, or find out that this was done. Of two processes that ask at once, one does it.

    Runs the variant's code: call it where a crash loses nothing."""
    device = devices.pick(recipe.device)
    arch, name = devices.arch(device), devices.name(device)
    try:
        path = record(recipe, key, arch, name)
        with open(path.with_suffix(".lock"), "w") as lock:
            say(phase="wait")
            fcntl.flock(lock, fcntl.LOCK_EX)
            if found := known(recipe, key, arch, name):
                return replace(found, compile_s=0.0, trial_s=0.0)
            outcome = _try(recipe, key, arch, say)
            if outcome.status in ("faster", "not faster"):
                write(path, json.dumps(asdict(outcome) | {"device": name}))
            return outcome
    except (BuildError, OSError, ValueError) as error:  # ValueError: the recipe has no variant for such a key
        log = getattr(error, "log", "")
        if full := re.search(DISK_FULL, f"{error} {log}"):
            return Outcome("full", full[0])
        return Outcome("failed", str(error))


def _try(recipe: Recipe, key: Key, arch: str, say: Callable[..., None]) -> Outcome:
    device = devices.pick(recipe.device)
    capability, op = devices.capability(device), get(recipe.op)
    say(phase="compile")
    generic = build.function(recipe.generic(), arch)
    begin = time.perf_counter()
    variant = recipe.function(key, arch)
    compile_s = time.perf_counter() - begin
    kernel = recipe.kernel(key)
    case = recipe.case(key, kernel.name)
    say(phase="verify")
    try:
        for sizes in sorted({tuple(span.low for span in key), tuple(span.high for span in key)}):
            within = case.with_shape({**case.shape, **dict(zip(recipe.axes, sizes, strict=True))})
            verify(op, within, kernel, variant, device, capability, SEED)
        say(phase="trial")
        (variant_us, generic_us), found = _compared(Bench(op, case, variant, generic, device, SEED))
    except (WrongResult, Dishonest) as error:
        return Outcome("failed", f"it is not right: {error}", compile_s)
    status, why = "faster" if found.verdict == "faster" else "not faster", ""
    if found.aa_spread >= RESTLESS:
        status = "undecided"
        why = f"the machine was busy: {recipe.fallback} differed by {found.aa_spread:.0%} from itself"
    trial_s = time.perf_counter() - begin - compile_s
    return Outcome(status, why, compile_s, trial_s, variant_us, generic_us, found.speedup, found.low, found.high)


def _compared(bench: Bench) -> tuple[tuple[float, float], Comparison]:
    """Microseconds of a call of both, and the comparison of steady blocks: the first whose control is quiet, or else that
    with the quietest."""
    timing = Timing(steady_block_s=BLOCK_S)
    bench.warm_up(BLOCK_S / 2)
    best: tuple[tuple[float, float], Comparison] | None = None
    for _ in range(REPEATS):
        times = [float(np.median(block)) for block in bench.steady(timing, lambda: None)]
        found = compare_blocks(times, LEAST_GAIN)
        if best is None or found.aa_spread < best[1].aa_spread:
            best = (1e6 * (times[0] * times[3]) ** 0.5, 1e6 * (times[1] * times[2]) ** 0.5), found
        if best[1].aa_spread < RESTLESS:
            break
    assert best is not None
    return best
