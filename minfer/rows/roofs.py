"""How fast a device copies a number of bytes, by its measured peaks. The bench and the analysis share this rule."""

import itertools
import math
import re
from collections.abc import Mapping

COLD_COPY = re.compile(r"cold_copy_([0-9]+)mib_gbps")


def name_cold_copy(mebibytes: int) -> str:
    """The name of the peak of cold copies that read and write so many MiB together."""
    return f"cold_copy_{mebibytes}mib_gbps"


def copy_rate(peaks: Mapping[str, float], nbytes: float) -> float:
    """GB/s (bytes read plus bytes written) at which the device copies `nbytes`, its caches cold: the roof of a cold call.

    A long copy writes everything back to memory. A short copy can be faster, because a part of its output is still in
    the cache when the clock stops. Between two measured sizes the rate is interpolated over the logarithm of the size.
    It is never below `copy_gbps`, the rate of a long copy. Outside of the measured sizes it is `copy_gbps`. 0.0 if
    nothing was measured.
    """
    long = peaks.get("copy_gbps", 0.0)
    found = sorted(
        (int(match[1]) * 2.0**20, rate) for name, rate in peaks.items() if (match := COLD_COPY.fullmatch(name))
    )
    for (low, at_low), (high, at_high) in itertools.pairwise(found):
        if low <= nbytes <= high:
            share = math.log(nbytes / low) / math.log(high / low)
            return max(long, at_low + share * (at_high - at_low))
    return long
