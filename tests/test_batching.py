"""`minfer.batching`: what holds of every grouping of every trace, traces in files, and kernels on batches."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import astuple

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minfer import attention, batching, seq_sum
from minfer.batching import NAMES, Batch, Policy, Request, TraceError

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


# Traces.


@pytest.mark.parametrize(
    "make",
    [
        lambda **of: batching.uniform(2000, longest=100, **of),
        lambda **of: batching.zipf(2000, longest=100, **of),
        lambda **of: batching.lognormal(2000, median=20, longest=100, **of),
    ],
)
def test_a_seed_gives_the_same_trace_and_a_rate_its_arrivals(make):
    trace = make(rate=50.0, seed=3)
    assert trace == make(rate=50.0, seed=3) and trace != make(rate=50.0, seed=4)
    at_once = make(seed=3)
    assert [request.length for request in at_once] == [request.length for request in trace]
    assert all(request.arrival == 0 for request in at_once)
    assert all(1 <= request.length <= 100 for request in trace)
    assert trace[-1].arrival == pytest.approx(2000 / 50, rel=0.1)
    assert [request.number for request in trace] == list(range(2000))


def test_the_distributions_are_what_they_say():
    def lengths(trace):
        return torch.tensor([float(request.length) for request in trace])

    assert lengths(batching.uniform(20000, shortest=11, longest=30)).mean() == pytest.approx(20.5, rel=0.02)
    of_zipf = lengths(batching.zipf(20000, longest=1000, exponent=1.5))
    assert (of_zipf == 1).sum() / (of_zipf == 4).sum() == pytest.approx(8, rel=0.2)
    logs = lengths(batching.lognormal(20000, median=500, sigma=0.5, longest=100_000)).log()
    assert logs.median().exp() == pytest.approx(500, rel=0.02) and logs.std() == pytest.approx(0.5, rel=0.03)
    assert batching.uniform(0, longest=4) == []


def test_both_formats_are_read(tmp_path):
    expected = [Request(0, 0.0, 12), Request(1, 0.5, 1), Request(2, 0.5, 300)]
    lines = [json.dumps({"arrival": r.arrival, "length": r.length, "user": "x"}) for r in expected]
    (tmp_path / "a.jsonl").write_text("\ufeff" + lines[0] + "\n\n" + "\r\n".join(lines[1:]))
    cells = "\n".join(f"{r.length},,{r.arrival}" for r in expected)
    (tmp_path / "a.csv").write_text(f"length, user ,arrival\n\n{cells}\n")
    assert batching.read(tmp_path / "a.jsonl") == batching.read(str(tmp_path / "a.csv")) == expected
    for name in ("e.JSONL", "e.csv"):
        (tmp_path / name).write_text("\n")
        assert batching.read(tmp_path / name) == []


GOOD = '{"arrival": 1.0, "length": 5}'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"arrival": 1.0}', "it has no length"),
        ('{"arrival": 1.0, "length": 0}', "length must be a whole number of tokens from 1, got 0"),
        ('{"arrival": 1.0, "length": 5.0}', "length must be a whole number of tokens from 1, got 5.0"),
        ('{"arrival": 1.0, "length": true}', "length must be a whole number of tokens from 1, got True"),
        ('{"arrival": -1, "length": 5}', "arrival must be seconds from 0, got -1"),
        ('{"arrival": NaN, "length": 5}', "arrival must be seconds from 0, got nan"),
        ('{"arrival": 1e999, "length": 5}', "arrival must be seconds from 0, got inf"),
        ('{"arrival": [1], "length": 5}', r"arrival must be seconds from 0, got \[1\]"),
        ('{"arrival": 0.5, "length": 5}', "arrival 0.5 is before that of the request above it"),
        ("[1.0, 5]", "it is no JSON object such as"),
        ("arrival, length", "it is no JSON object such as"),
        ("[" * 100_000, "it is no JSON object such as"),
        ('{"arrival": 1, "length": %s}' % ("9" * 5000), "it is no JSON object such as"),
        ('{"arrival": 1' + "0" * 400 + ', "length": 5}', "arrival must be seconds from 0, got a number of more than"),
        ("\ufffd\x00", "it is no JSON object such as"),
    ],
)
def test_a_bad_line_is_a_sentence_with_its_number(tmp_path, line, said):
    path = tmp_path / "t.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n{GOOD}\n")
    with pytest.raises(TraceError, match=rf"^{path}, line 3: {said}"):
        batching.read(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1.0,5\n", ", line 1: the header must name arrival and length once each"),
        ("arrival,length,length\n1,5,5\n", ", line 1: the header must name"),
        ("arrival,length\n1.0,5\n1.0\n", ", line 3: it has no length"),
        ("arrival,length\n1.0,5_0\n", ", line 2: length must be a whole number of tokens from 1, got '5_0'"),
        ("arrival,length\nsoon,5\n", ", line 2: arrival must be seconds from 0, got 'soon'"),
        ('arrival,length\n"' + "9" * 200_000 + '",5\n', ", line 2: field larger than field limit"),
    ],
)
def test_a_bad_csv_is_a_sentence(tmp_path, text, said):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=f"^{path}{said}"):
        batching.read(path)


def test_a_file_of_another_kind_is_a_sentence(tmp_path):
    with pytest.raises(TraceError, match=r"is not a trace: its name must end in \.jsonl or \.csv$"):
        batching.read(tmp_path / "trace.txt")
    (tmp_path / "binary.jsonl").write_bytes(bytes(range(256)))
    with pytest.raises(TraceError, match="line 1: it is no JSON object"):
        batching.read(tmp_path / "binary.jsonl")


# Kernels.


@pytest.mark.parametrize("name", NAMES)
def test_what_is_joined_and_split_is_what_each_request_gets_alone(name):
    lengths = [7, 1, 30, 3, 3, 16, 1, 22]
    trace = [Request(number, 0.0, length) for number, length in enumerate(lengths)]
    values = [torch.randn(length) for length in lengths]
    projected = [torch.randn(length, 3, 2, 64).bfloat16() for length in lengths]
    sums, heads = {}, {}
    for batch in Policy(name, capacity=64, block=8).batches(trace):
        chosen = [request.number for request in batch.requests]
        x = batching.join(batch, [values[number] for number in chosen])
        given = batching.seqlens(batch, x.device)
        sums |= dict(zip(chosen, batching.split(batch, seq_sum(x, **given)), strict=True))
        qkv = batching.join(batch, [projected[number] for number in chosen])
        out = attention(*qkv.unbind(-3), causal=True, **given)
        heads |= dict(zip(chosen, batching.split(batch, out), strict=True))
    for number, (value, qkv) in enumerate(zip(values, projected, strict=True)):
        torch.testing.assert_close(sums[number], value.sum().expand(len(value)))
        alone = attention(*qkv[None].unbind(-3), causal=True)[0]
        torch.testing.assert_close(heads[number], alone)


def test_values_that_are_not_of_the_batch_are_refused():
    (batch,) = Policy("none").batches([Request(0, 0.0, 3), Request(1, 0.0, 5)])
    with pytest.raises(ValueError, match=r"^a batch with the lengths \[3, 5\] takes a value of each, got \[5, 3\]$"):
        batching.join(batch, [torch.zeros(5), torch.zeros(3)])
    with pytest.raises(
        ValueError, match=r"^a batch takes values that are alike but for their lengths, got torch.bfloat16 "
    ):
        batching.join(batch, [torch.zeros(3), torch.zeros(5).bfloat16()])
    with pytest.raises(ValueError, match=r"^a batch takes values that are alike but for their lengths, got"):
        batching.join(batch, [torch.zeros(3, 4), torch.zeros(5, 1)])  # which would be broadcast
    with pytest.raises(ValueError, match=r"^a result of this batch begins with the sizes \(2, 5\), got \(2, 3\)$"):
        batching.split(batch, torch.zeros(2, 3))


@pytest.mark.parametrize("name", ["none", "packed"])
def test_values_may_be_a_generator_and_must_be_tensors(name):
    (batch,) = Policy(name).batches([Request(0, 0.0, 3), Request(1, 0.0, 5)])
    whole = batching.join(batch, (torch.ones(length) for length in batch.lengths))
    assert whole.sum() == 8
    for wrong, kind in (([[1.0] * 3, [1.0] * 5], "list"), ([np.ones(3), np.ones(5)], "ndarray")):
        with pytest.raises(TypeError, match=f"^a batch takes tensors, got {kind}$"):
            batching.join(batch, wrong)
        with pytest.raises(TypeError, match=r"^a batch takes tensors, got ndarray$"):
            batching.split(batch, whole.numpy())
    with pytest.raises(ValueError, match=r"takes a value of each, got \[None, None\]$"):
        batching.join(batch, [torch.tensor(1.0), torch.tensor(2.0)])


@pytest.mark.parametrize("name", ["none", "packed"])
def test_gradients_go_through_join_and_split(name):
    (batch,) = Policy(name, block=8).batches([Request(0, 0.0, 3), Request(1, 0.0, 5)])
    values = [torch.randn(length, requires_grad=True) for length in (3, 5)]
    sum(part.sum() for part in batching.split(batch, 2 * batching.join(batch, values))).backward()
    assert all(torch.equal(value.grad, torch.full_like(value, 2.0)) for value in values)


@pytest.mark.parametrize("work", [batching.SeqSum, batching.Attention])
def test_a_trace_is_served_by_kernels(work):
    trace = batching.lognormal(30, median=10, longest=60, rate=1000.0)
    for skip in (True, False):
        names = NAMES if skip else NAMES[:-1]
        policies = [Policy(name, capacity=128, block=16) for name in names]
        results = batching.compare(trace, policies, batching.timed(work(128, device="cpu", skip=skip)))
        assert [result.policy for result in results] == list(names)
        assert all(result.busy_s > 0 and min(result.latencies) > 0 for result in results)
    with pytest.raises(ValueError, match=r"^a packed batch needs its lengths"):
        batching.compare(trace, [Policy("packed", capacity=128)], work(128, device="cpu", skip=False))
    with pytest.raises(ValueError, match=r"^a batch has 60 slots, and there is data for 8; raise capacity$"):
        work(8, device="cpu")(Policy("none").batches([Request(0, 0.0, 60)])[0])


def test_a_batch_of_a_new_shape_runs_once_untimed():
    ran = []
    step = batching.timed(ran.append)
    one, other = (Policy("none").batches([Request(0, 0.0, length)])[0] for length in (3, 4))
    for batch in (one, one, other):
        assert step(batch) >= 0
    assert [batch.slots for batch in ran] == [3, 3, 3, 4, 4]


def test_results_are_a_table():
    import pandas as pd

    results = batching.compare(batching.uniform(5, longest=9), step=lambda batch: 0.5)
    table = pd.DataFrame(results)
    assert list(table.policy) == list(NAMES) and len(astuple(results[0])) == len(table.columns)


def test_the_default_runs_minfers_attention():
    (result,) = batching.compare([Request(0, 0.0, 4)], ["packed"])
    assert result.tokens == 4 and result.busy_s > 0


@pytest.mark.slow
def test_the_benchmark_writes_a_row_for_each_way(tmp_path, capsys):
    from benchmarks import batching as benchmark

    assert benchmark.main(["--device", "cpu", "--requests", "6", "--rounds", "1", "--root", str(tmp_path)]) == 0
    (path,) = (tmp_path / "benchmarks" / "results").iterdir()
    rows = pq.read_table(path).to_pylist()
    ways = len(benchmark.ways(benchmark.SIZES["cpu"]))
    assert ways == 7 and len(rows) == 2 * 3 * 2 * ways  # kernels, traces, arrivals
    assert all(
        row["padded_share"][0] < 0.1 for row in rows if row["policy"] == "packed" and row["arrivals"] == "at once"
    )
    mine = tmp_path / "mine.csv"
    mine.write_text("arrival,length\n0,7\n0.001,3000\n")
    assert benchmark.main(["--device", "cpu", "--rounds", "1", "--trace", str(mine)]) == 0
    assert "mine" in capsys.readouterr().out
    mine.write_text("arrival,length\n0,none\n")
    with pytest.raises(SystemExit, match=r"^batching.py: .*mine.csv, line 2: length must be a whole number"):
        benchmark.main(["--device", "cpu", "--trace", str(mine)])
