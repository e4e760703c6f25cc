"""`minfer.batching`: what holds of every grouping of every trace, and a replay by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minfer import batching
from minfer.batching import NAMES, Batch, Policy, Request

MOST_LENGTH = 60
PROPERTY = settings(max_examples=150, deadline=None, derandomize=True)


@st.composite
def traces(draw: st.DrawFn) -> list[Request]:
    lengths = draw(st.lists(st.integers(1, MOST_LENGTH), max_size=40))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.5, 3.0]), min_size=len(lengths), max_size=len(lengths)))
    found, now = [], 0.0
    for number, (length, gap) in enumerate(zip(lengths, gaps, strict=True)):
        now += gap
        found.append(Request(number, now, length))
    return found


@st.composite
def policies(draw: st.DrawFn, names: tuple[str, ...] = NAMES) -> Policy:
    block = draw(st.integers(1, 9))
    least = -(-MOST_LENGTH // block) * block  # so that every request fits
    buckets = draw(st.sets(st.integers(1, MOST_LENGTH), max_size=4))
    return Policy(
        draw(st.sampled_from(names)),
        capacity=draw(st.integers(least, 4 * least)),
        most=draw(st.integers(1, 8)),
        block=block,
        buckets=tuple(sorted(buckets)),
    )


def numbers(batches: list[Batch]) -> list[int]:
    return [request.number for batch in batches for request in batch.requests]


@PROPERTY
@given(traces(), policies())
def test_every_request_is_in_one_batch_that_has_room(trace, policy):
    batches = policy.batches(trace)
    assert sorted(numbers(batches)) == list(range(len(trace)))
    for batch in batches:
        lengths = batch.lengths
        assert 1 <= len(lengths) <= policy.most and batch.slots <= policy.capacity
        if batch.packed:
            assert sum(lengths) <= batch.slots < sum(lengths) + policy.block and batch.slots % policy.block == 0
        else:
            assert max(lengths) <= batch.width < max(lengths) + policy.block and batch.width % policy.block == 0
            assert batch.slots == len(lengths) * batch.width
        assert batch.padded_share == pytest.approx((batch.slots - sum(lengths)) / batch.slots)
        assert batch.cu_seqlens == [sum(lengths[:count]) for count in range(len(lengths) + 1)]


@PROPERTY
@given(traces(), policies())
def test_the_order_is_the_policys(trace, policy):
    batches = policy.batches(trace)
    if policy.name == "none":
        assert numbers(batches) == list(range(len(trace)))
    if policy.name == "sorted":
        found = [(request.length, request.number) for batch in batches for request in batch.requests]
        assert found == sorted(found)
    for batch in batches:
        if policy.name != "sorted":
            assert numbers([batch]) == sorted(numbers([batch]))
    if policy.name == "bucketed":
        buckets = [{policy.bucket(length) for length in batch.lengths} for batch in batches]
        assert all(len(bucket) == 1 for bucket in buckets)
        assert [batch.requests[0].number for batch in batches] == sorted(batch.requests[0].number for batch in batches)


@PROPERTY
@given(traces(), policies(("none", "sorted", "bucketed")))
def test_no_batch_of_rows_ends_before_it_must(trace, policy):
    """The next request of the same kind would not have fit."""
    of_bucket: dict[int, list[Batch]] = {}
    for batch in policy.batches(trace):
        of_bucket.setdefault(policy.bucket(batch.lengths[0]) if policy.name == "bucketed" else 0, []).append(batch)
    for batches in of_bucket.values():
        for batch, after in itertools.pairwise(batches):
            width = max(batch.width, policy.padded(after.lengths[0]))
            count = len(batch.requests) + 1
            assert count > policy.most or count * width > policy.capacity


@PROPERTY
@given(traces(), policies(("packed",)))
@example([Request(number, 0.0, length) for number, length in enumerate((30, 30, 1))], Policy("packed", 62, block=4))
def test_packing_is_first_fit(trace, policy):
    """By the definition, which looks at each batch in turn."""
    groups: list[list[Request]] = []
    for request in trace:
        for group in groups:
            tokens = sum(other.length for other in group) + request.length
            if len(group) < policy.most and policy.padded(tokens) <= policy.capacity:
                group.append(request)
                break
        else:
            groups.append([request])
    assert [list(batch.requests) for batch in policy.batches(trace)] == groups


@PROPERTY
@given(traces(), policies(), st.sampled_from([0.0, 0.01, 1.0]))
@example([], Policy("packed"), 1.0)
def test_a_replay_serves_each_request_after_it_arrived(trace, policy, cost):
    batches: list[Batch] = []

    def step(batch: Batch) -> float:
        batches.append(batch)
        return cost * batch.slots

    (result,) = batching.compare(trace, [policy], step, clock=lambda: 0.0)
    assert sorted(numbers(batches)) == list(range(len(trace)))
    assert result.requests == len(result.latencies) == len(trace) and result.batches == len(batches)
    assert result.slots == sum(batch.slots for batch in batches) and result.busy_s == pytest.approx(cost * result.slots)
    if not trace:
        figures = (result.padded_share, result.busy_share, result.tokens_per_s, result.p50_ms, result.p99_ms)
        assert all(math.isnan(value) for value in figures)
        return
    assert result.padded_share == pytest.approx(1 - result.tokens / result.slots)
    for request, latency in zip(trace, result.latencies, strict=True):
        assert latency >= cost * policy.padded(request.length) * (1 - 1e-9) - 1e-9
    assert result.p50_ms <= result.p90_ms <= result.p99_ms <= 1e3 * max(result.latencies) * (1 + 1e-9)
    if cost:
        assert result.tokens_per_s == pytest.approx(result.tokens / (cost * result.slots))
        assert 0 < result.busy_share <= 1 + 1e-9


def test_a_replay_by_hand():
    """Two requests at 0; while they run for 6 s, two more come, and run in the next round."""
    trace = [Request(0, 0.0, 2), Request(1, 0.0, 3), Request(2, 1.0, 1), Request(3, 6.0, 2), Request(4, 20.0, 1)]
    clock = iter(range(100))  # grouping takes a second
    (result,) = batching.compare(trace, [Policy("none", capacity=6)], lambda batch: batch.slots, lambda: next(clock))
    assert result.latencies == (7.0, 7.0, 11.0, 6.0, 2.0)
    assert (result.batches, result.tokens, result.slots, result.busy_s) == (3, 9, 11, 14.0)
    assert (result.busy_share, result.p50_ms) == (14 / 22, 7000.0)


def test_rows_without_grouping_have_the_most_padding():
    trace = batching.zipf(500, longest=500)
    share = {result.policy: result.padded_share for result in batching.compare(trace, step=lambda batch: 1.0)}
    assert share["packed"] == 0 < share["sorted"] < share["bucketed"] < 0.5 < share["none"]


def test_a_request_that_fits_no_batch_is_a_sentence_before_anything_runs():
    trace, ran = [Request(0, 0.0, 5), Request(7, 1.0, 90)], []
    said = "^request 7 has 90 tokens, 96 padded, and a batch has room for 90; raise capacity or leave it out$"
    for name in NAMES:
        policy = Policy(name, capacity=90, block=16)
        for call in (lambda p=policy: p.batches(trace), lambda p=policy: batching.compare(trace, [p], ran.append)):
            with pytest.raises(ValueError, match=said):
                call()
    assert not ran


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Policy("best"), "there is no policy 'best'; choose one of none, sorted, bucketed, packed"),
        (lambda: Policy("none", capacity=0), "a policy takes an int of at least 1 as its capacity, got 0"),
        (lambda: Policy("none", block=2.5), "a policy takes an int of at least 1 as its block, got 2.5"),
        (lambda: Policy("none", buckets=(5, 5)), r"a policy takes buckets that increase from 1, got \(5, 5\)"),
        (lambda: Policy("none", most=True), "a policy takes an int of at least 1 as its most, got True"),
        (lambda: Policy("none", buckets=None), "a policy takes buckets that increase from 1, got None"),
        (lambda: Policy("none", buckets=(4.5,)), r"a policy takes buckets that increase from 1, got \(4.5,\)"),
        (lambda: Policy("none", buckets="48"), "a policy takes buckets that increase from 1, got '48'"),
        (lambda: Policy("none", buckets=(0, 4)), r"a policy takes buckets that increase from 1, got \(0, 4\)"),
        (lambda: batching.SeqSum(-1), "a step takes an int of at least 1 as its capacity, got -1"),
        (lambda: batching.SeqSum(9, dtype="float64"), "a step takes its dtype as one of .*, got 'float64'"),
        (lambda: Request(3, 0.0, True), "request 3 must have an int from 1 as its length"),
        (lambda: Request(3, "0", 4), "request 3 must have an int from 1 as its length .* got 4 tokens at '0' s"),
        (lambda: Request(3, 0.0, 0), "request 3 must have an int from 1 as its length"),
        (lambda: Request(3, 0.0, 2.5), "request 3 must have an int from 1 as its length"),
        (lambda: Request(3, math.nan, 4), "request 3 must have an int from 1 as its length"),
        (lambda: batching.uniform(3, longest=0), "a trace takes lengths with 1 <= shortest <= longest"),
        (lambda: batching.uniform(3, longest=5, rate=0), "a trace takes a rate above 0 requests a second, got 0"),
        (lambda: batching.zipf(3, longest=5, exponent=-1), "a trace takes an exponent from 0 to 100, got -1"),
        (lambda: batching.lognormal(3, median=math.inf, longest=5), "a trace takes a median above 0"),
        (lambda: batching.uniform(2.5, longest=5), "a trace takes an int below 2.62 as its count, got 2.5"),
        (lambda: batching.uniform(2, longest=3.5), "a trace takes an int below 2.62 as its longest length, got 3.5"),
        (lambda: batching.uniform(2, longest=1 << 63), "a trace takes an int below 2.62 as its longest length, got 9"),
        (lambda: batching.lognormal(-1, median=3, longest=5), "a trace takes a count of at least 0, got -1"),
        (
            lambda: batching.compare([Request(0, 1.0, 1), Request(1, 0.0, 1)], step=len),
            "a trace must be in the order of its arrivals; sort it",
        ),
        (
            lambda: batching.compare([Request(0, 1.0, 1)] * 2, step=lambda batch: 1.0),
            "a trace must have requests of different numbers",
        ),
        (
            lambda: batching.compare([Request(0, 1.0, 1)], step=lambda batch: math.nan),
            "a step must return the seconds that it took, got nan",
        ),
        (
            lambda: batching.compare([Request(0, 1.0, 1)], step=lambda batch: None),
            "a step must return the seconds that it took, got None",
        ),
    ],
)
def test_mistakes_are_a_sentence_each(make, said):
    with pytest.raises(ValueError, match=f"^{said}"):
        make()


def test_one_policy_a_list_of_buckets_and_numbers_of_numpy_are_taken():
    trace = [Request(0, np.float64(0.0), 5), Request(1, 1, 4)]
    for one in ("packed", Policy("packed")):
        (result,) = batching.compare(trace, one, lambda batch: np.float32(0.5), lambda: 0.0)
        assert (result.policy, result.busy_s, type(result.busy_s)) == ("packed", 1.0, float)
    assert hash(Policy("bucketed", buckets=[4, 8])) == hash(Policy("bucketed", buckets=(4, 8)))


def test_a_trace_of_anything_but_requests_is_refused():
    for wrong, kind in (([3, 4], "int"), ([(0, 0.0, 3)], "tuple"), ("trace.jsonl", "str")):
        with pytest.raises(TypeError, match=f"^a trace has Requests, got {kind}$"):
            batching.compare(wrong, step=lambda batch: 1.0)
