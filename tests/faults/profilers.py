"""Profilers that go wrong, each in one way. Loaded with `extra=[tests/faults/profilers.py]`."""

import os
import sys
import time
from types import SimpleNamespace

from minfer.profilers import Finding


def good(job):
    for index, case in enumerate(job.cases):
        yield Finding({"index": index, "m": case.shape["m"]}, {"scope": "f"}, "ok")


def raises(job):
    yield next(good(job))
    raise RuntimeError("counters are not permitted here")


def stops_early(job):
    yield next(good(job))


def hangs(job):
    yield next(good(job))
    while True:
        time.sleep(1)


def prints(job):
    print("{}", flush=True)
    yield from good(job)


def writes_to_the_pipe(job):
    for number in range(3, 64):
        try:
            os.write(number, b'{"metrics": {"index": 1.0}}\n')
        except OSError:
            continue
    yield from good(job)


def answers_nonsense(job):
    for speed in ("very fast", float("nan"), 1.0):
        yield Finding({"speed": speed})


def exits(job):
    os._exit(3)
    yield


for function in (good, raises, stops_early, hangs, prints, writes_to_the_pipe, answers_nonsense, exits):
    name = f"minfer.profilers.{function.__name__}"
    sys.modules[name] = SimpleNamespace(RUNS_KERNELS=function is not good, profile=function)
