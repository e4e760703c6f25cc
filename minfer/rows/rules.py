"""Thresholds for reading the figures of rows, shared by the bench, the summary of a run, tables and plots."""

REGIMES = ("cold", "steady")
LEAST_GAIN = 0.01  # a difference below 1 % is a tie, whatever the statistics say
WIDEST = 3  # upper over lower end of a ratio's interval; a wider one says nothing of the ratio, and only its verdict is shown
MOST_DRIFT = 1.25  # largest ratio of a baseline's times that the card's clock may explain (we saw 1.1)

# How far above the measured peak a kernel may be before it is `impossible`. The probes do not quite reach the peak, and
# under a power limit a sampled clock differs from the mean clock by a few percent.
HEADROOM = 1.05

# The targets of `benchmarks/cost.py`: seconds of a case without its windows, and a sweep over its windows and builds.
CASE_OVERHEAD_S, SWEEP_OVER_WINDOWS = 0.3, 1.3


def is_too_wide(low: float | None, high: float | None) -> bool:
    """Whether the interval of a ratio is so wide (`WIDEST`) that the ratio is not shown, in a terminal, table, plot or page."""
    return low is not None and high is not None and high > WIDEST * low


ABOVE_ROOF = (  # what the mark of `is_above_roof` means
    "above the measured peak: that peak is too low here, because its probe has another size, or another mix of reads and"
    " writes"
)


def is_above_roof(percent_of_peak: float | None) -> bool:
    """Whether a share of the measured peaks is shown as more than 100 %. Such a share is marked, not hidden."""
    return percent_of_peak is not None and round(percent_of_peak, 1) > 100
