"""Traces of `minfer.batching`: distributions, and files with bad lines."""

from __future__ import annotations

import json

import pytest
import torch

from minfer import batching
from minfer.batching import Request, TraceError


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
