"""Thresholds for reading the figures of rows, shared by the bench, the summary of a run, tables and plots."""

REGIMES = ("cold", "steady")
LEAST_GAIN = 0.01  # a difference below 1 % is a tie, whatever the statistics say
MOST_DRIFT = 1.25  # largest ratio of a baseline's times that the card's clock may explain (we saw 1.1)

# How far above the measured peak a kernel may be before it is `impossible`. The probes do not quite reach the peak, and
# under a power limit a sampled clock differs from the mean clock by a few percent.
HEADROOM = 1.05

# The targets of `benchmarks/cost.py`: seconds of a case without its windows, and a sweep over its windows and builds.
CASE_OVERHEAD_S, SWEEP_OVER_WINDOWS = 0.3, 1.3
