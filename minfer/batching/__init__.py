"""Requests of different lengths in batches, with little padding, and what each way to group them costs.

    from minfer import batching

    trace = batching.lognormal(1000, median=200, sigma=1.0, longest=2048, rate=500.0)  # or batching.read("trace.jsonl")
    for batch in batching.Policy("packed", capacity=4096).batches(trace):
        x = batching.join(batch, [states[request.number] for request in batch.requests])
        y = minfer.seq_sum(x, **batching.seqlens(batch, x.device))  # padding is skipped, or there is none
        results += batching.split(batch, y)

    pandas.DataFrame(batching.compare(trace))  # padded share, tokens/s and latency of each policy

`traces` makes and reads traces, `policies` groups requests, `replay` serves a trace and reports, `kernels` hands batches to
minfer's attention and `seq_sum`, or to a function of yours.
"""

from minfer.batching.kernels import Attention, SeqSum, join, seqlens, split, timed
from minfer.batching.policies import NAMES, Batch, Policy
from minfer.batching.replay import Result, compare
from minfer.batching.traces import Request, TraceError, lognormal, read, uniform, zipf

__all__ = [
    "NAMES", "Attention", "Batch", "Policy", "Request", "Result", "SeqSum", "TraceError", "compare", "join", "lognormal",
    "read", "seqlens", "split", "timed", "uniform", "zipf",
]  # fmt: skip
