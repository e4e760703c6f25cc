"""How to time; imports nothing heavy, so that the command line can read its configuration at once."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

# What null means on each kind of device. A processor's time also depends on what else runs there, and only a GPU has a clock
# that takes half a second to settle.
PRECISION = {"cuda": 0.005, "cpu": 0.05}
STEADY_BLOCK_S = {"cuda": 1.0, "cpu": 0.25}
BRIEF_ROUNDS = 5
FIRST_S = 1.2  # of cold rounds in the first pass, at most
# The least difference of times that a device's clock resolves. CUDA documents about half a microsecond for its events.
RESOLUTION_S = {"cuda": 0.5e-6, "cpu": time.get_clock_info("perf_counter").resolution}


@dataclass
class Timing:
    """How to time a case: a preset of `conf/timing`.

    name: says in the row which preset it was, and which of its values were changed (`minfer.plan.config.named`).
    warmup_s: seconds to run kernel and baseline before anything is timed.
    looks: numbers of cold rounds after which to look whether the ratio is known well enough; the last one is the cap.
    precision: what is well enough: half the width of the 95 % interval of the ratio, relative; None: `PRECISION`. A row whose
        interval is wider is unconverged, unless the clock resolves no less (`RESOLUTION_S`).
    cold_cap_s: seconds after which to give up looking and call the case unconverged...
    least_rounds: ...but not before so many rounds.
    steady_block_s: seconds of each of the four steady blocks; 0 leaves the steady regime out; None: `STEADY_BLOCK_S`.
    audit: also time with a second clock (CUPTI), and flag the row where the two disagree; on a GPU only.
    """

    name: str = "default"
    warmup_s: float = 0.1
    looks: list[int] = field(default_factory=lambda: [30, 60, 120, 240, 480, 960, 1920])
    precision: float | None = None
    cold_cap_s: float = 3.0
    least_rounds: int = 5
    steady_block_s: float | None = None
    audit: bool = False

    def on(self, device: str) -> Timing:
        """The same with the precision and the blocks that it means on a kind of device, "cuda" or "cpu"."""
        return replace(
            self,
            precision=PRECISION[device] if self.precision is None else self.precision,
            steady_block_s=STEADY_BLOCK_S[device] if self.steady_block_s is None else self.steady_block_s,
        )

    @property
    def target(self) -> float:
        """The precision; a GPU's where nothing says otherwise."""
        return PRECISION["cuda"] if self.precision is None else self.precision

    @property
    def block_s(self) -> float:
        """Seconds of a steady block; a GPU's where nothing says otherwise."""
        return STEADY_BLOCK_S["cuda"] if self.steady_block_s is None else self.steady_block_s

    @property
    def steady_s(self) -> float:
        """About how many seconds the steady blocks of a case take, the wait before them included."""
        return 1.5 + 4 * self.block_s if self.block_s else 0.0

    def first(self) -> Timing:
        """The same for the first pass, after which a case is timed again: cold calls only, and for FIRST_S at most."""
        short = replace(self, cold_cap_s=min(self.cold_cap_s, FIRST_S), steady_block_s=0.0, audit=False)
        changed = [f"cold_cap_s={short.cold_cap_s:g}", "steady_block_s=0"]
        return replace(short, name=" ".join([self.name, *changed]))

    def brief(self) -> Timing:
        """The same for a kernel that takes long: BRIEF_ROUNDS cold rounds, and no steady blocks."""
        return replace(self, looks=[BRIEF_ROUNDS], least_rounds=BRIEF_ROUNDS, steady_block_s=0.0)

    def estimate(self) -> float:
        """About how many seconds a case takes at most, its verification included."""
        return 1.0 + self.warmup_s + self.cold_cap_s + self.steady_s
