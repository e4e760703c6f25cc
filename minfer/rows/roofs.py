"""How fast a device copies so many bytes, from its measured peaks. Shared by the bench and the analysis."""

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

    A long copy writes everything back to memory. Of a short one, a part of the output is still in the cache when the
    clock stops, so it can be faster. Between two measured sizes the rate is interpolated over the logarithm of the
    size. It is never below `copy_gbps`, the rate of a long copy; outside of the measured sizes it is that rate. 0.0 where
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
