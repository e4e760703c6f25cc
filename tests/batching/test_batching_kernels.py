"""Kernels on the batches of `minfer.batching`: what is joined and split is what each request gets alone."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from minfer import attention, batching, seq_sum
from minfer.batching import NAMES, Policy, Request


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
