"""What decides how figures of rows are read, wherever they are: in measuring, in a run's summary, in tables and in plots."""

REGIMES = ("cold", "steady")
LEAST_GAIN = 0.01  # a difference below 1 % is a tie, whatever the statistics say
MOST_DRIFT = 1.25  # largest ratio of a baseline's times that the card's clock may explain (we saw 1.1)

# How much better than the measured peak a kernel may be before it is impossible: for what the probes leave on the
# table, and for the few percent by which a sampled clock misses the mean of a clock that a power limit keeps moving.
HEADROOM = 1.05

# The targets of `benchmarks/cost.py`: seconds of a case without its windows, and a sweep over its windows and builds.
CASE_OVERHEAD_S, SWEEP_OVER_WINDOWS = 0.3, 1.3
