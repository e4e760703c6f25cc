"""`minfer.sample`: its distribution, that it is an op like PyTorch's own, and that the op's check sees what is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from minfer import ops, sample
from minfer.ops.sample import choose

OP = ops.get("sample")


def logits(rows: int = 5, vocab: int = 60) -> torch.Tensor:
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(7))


def chi_square(tokens: torch.Tensor, p: torch.Tensor) -> tuple[float, float]:
    """The statistic, and five standard deviations above its mean, of draws from one distribution."""
    counts, possible = torch.bincount(tokens.long(), minlength=len(p)), p > 0
    assert not bool(counts[~possible].any()), "a token was drawn that is not kept"
    expected = p[possible] * len(tokens)
    freedom = len(expected) - 1
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    return statistic, freedom + 5 * (2 * freedom) ** 0.5


def kept_probabilities(row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """By the definition, token by token, in fp64."""
    p = (row.double() / temperature).softmax(0)
    kept = torch.ones_like(p, dtype=torch.bool)
    if top_k:
        kept &= p >= p.sort().values[-top_k]
    above = torch.stack([(p * kept)[p > each].sum() for each in p]) / (p * kept).sum()
    kept &= (above < top_p) & (p >= min_p * p.max())
    return p * kept / (p * kept).sum()


CHOICES = [(1.0, 0, 1.0, 0.0), (0.7, 12, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.1), (1.5, 25, 0.9, 0.02)]


@pytest.mark.parametrize("choice", CHOICES)
def test_tokens_come_as_often_as_they_should(choice):
    row, draws = logits(1, 60), 20000
    tokens = sample(row.expand(draws, -1), *choice, generator=torch.Generator().manual_seed(1))
    p = kept_probabilities(row[0], *choice)
    statistic, most = chi_square(tokens, p)
    assert statistic < most
    flatter = (p**0.9) / (p**0.9).sum()
    statistic, most = chi_square(tokens, flatter)
    assert statistic > most, "the test would not see another temperature"


def test_one_seed_gives_the_same_tokens_and_another_others():
    x = logits(200)
    first, again, other = (sample(x, 2.0, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert first.equal(again) and not first.equal(other) and first.dtype == torch.int32


def test_temperature_zero_and_top_k_one_take_the_largest():
    x = logits(9)
    assert sample(x, temperature=0).equal(x.argmax(1).int())
    assert sample(x, top_k=1).equal(x.argmax(1).int())
    assert sample(torch.zeros(3, 5), temperature=0).tolist() == [0, 0, 0]


def test_ties_at_the_threshold_are_kept_together():
    x = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]]).expand(2000, -1)
    assert set(sample(x, top_k=2).tolist()) == {0, 1, 2, 3}


def test_extreme_logits():
    x = logits(5, 6)
    x[0] = -torch.inf
    x[1] = torch.nan
    x[2, 4] = torch.inf
    x[3, 1] = torch.nan
    x[4, :5] = -torch.inf
    tokens = sample(x.repeat(50, 1)).view(50, 5)
    assert bool(((tokens >= 0) & (tokens < 6)).all())
    assert set(tokens[:, 2].tolist()) == {4} and 1 not in tokens[:, 3] and set(tokens[:, 4].tolist()) == {5}


def test_logits_that_lie_badly():
    wide, u = logits(6, 90), torch.rand(6, generator=torch.Generator().manual_seed(2))
    for view in (wide[:, 3:70], wide[:, ::3], wide.t()[:6], wide[:1].expand(6, -1)):
        tokens = torch.ops.minfer.sample(view, u[: len(view)], 0.8, 20, 0.9, 0.0)
        assert tokens.equal(choose(view, u[: len(view)], 0.8, 20, 0.9, 0.0).int())
    assert sample(wide[:0]).shape == (0,)


def test_it_is_an_op_like_pytorchs_own():
    x = logits()
    torch.library.opcheck(torch.ops.minfer.sample.default, (x, torch.full((5,), 0.5), 0.8, 20, 0.9, 0.0))
    compiled = torch.compile(lambda x: sample(x, 0.8, top_k=20), backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (4, 5):
        assert compiled(logits(rows)).shape == (rows,)


def test_mistakes_are_a_sentence_each():
    x = logits()
    for call, said in (
        (lambda: sample(x[0]), r"takes logits of \(rows, vocab\), got \(60,\)$"),
        (lambda: sample(x[:, :0]), r"takes logits whose vocab is from 1 to 524288, got 0$"),
        (lambda: sample(x.half()), "takes logits of float32 or bfloat16, got torch.float16$"),
        (lambda: sample(x, -1.0), "takes a temperature from 0, got -1.0"),
        (lambda: sample(x, float("nan")), "takes a temperature from 0, got nan"),
        (lambda: sample(x, top_k=-1), "takes a top_k of at least 0, got -1"),
        (lambda: sample(x, 0.0, top_k=-1), "takes a top_k of at least 0, got -1"),
        (lambda: sample(x, 0.0, top_p=1.5), "takes top_p above 0 and at most 1, got 1.5"),
        (lambda: sample(x, 0.0, min_p=-0.1), "takes min_p from 0 to 1, got -0.1"),
        (lambda: sample(x, top_p=0.0), "takes top_p above 0 and at most 1, got 0.0"),
        (lambda: sample(x, min_p=1.5), "takes min_p from 0 to 1, got 1.5"),
        (
            lambda: torch.ops.minfer.sample(x, x[0], 1.0, 0, 1.0, 0.0),
            r"takes u of float32 and the shape \(5,\), got torch.float32, \(60,\)$",
        ),
    ):
        with pytest.raises(ValueError, match=f"^minfer.sample {said}"):
            call()


def other_choice(**changes: float) -> Callable[..., torch.Tensor]:
    return lambda x, u, **call: choose(x, u, **(call | changes))


WRONG: dict[str, Callable[..., torch.Tensor]] = {
    "no top_k": other_choice(top_k=0),
    "one more than top_k": lambda x, u, **call: choose(x, u, **(call | {"top_k": call["top_k"] + 5})),
    "no top_p": other_choice(top_p=1.0),
    "another temperature": other_choice(temperature=1.0),
    "the number ignored": lambda x, u, **call: choose(x, torch.full_like(u, 0.5), **call),
    "the next token": lambda x, u, **call: choose(x, u, **call) + 1,
    "an index out of bounds": lambda x, u, **call: torch.full(u.shape, 1 << 30),
}


@pytest.mark.parametrize("how", WRONG)
def test_the_check_sees_what_is_wrong(how):
    case = OP.case("torch", "float32", {"rows": 400, "vocab": 1000})
    generator = torch.Generator().manual_seed(5)
    given = {"logits": 2 * torch.randn(400, 1000, generator=generator), "u": torch.rand(400, generator=generator)}
    check, call = OP.checks["tokens"], OP.call(case)
    assert bool(check(case, given | {"tokens": choose(given["logits"], given["u"], **call)}).all())
    assert not bool(check(case, given | {"tokens": WRONG[how](given["logits"], given["u"], **call)}).all())


SETTINGS = {
    "temperature": (0.0, 0.5, 1.0, 1.7),
    "top_k": (0, 1, 7, 40),
    "top_p": (1.0, 0.3, 0.9),
    "min_p": (0.0, 0.05, 0.3),
}


def settings_of(rows: int, seed: int = 3) -> dict[str, torch.Tensor]:
    drawn = random.Random(seed)
    dtypes = {name: torch.int32 if name == "top_k" else torch.float32 for name in SETTINGS}
    return {name: torch.tensor(drawn.choices(x, k=rows), dtype=dtypes[name]) for name, x in SETTINGS.items()}


def by_row(x: torch.Tensor, u: torch.Tensor, settings: dict[str, torch.Tensor]) -> list[int]:
    """The tokens by `choose`, row by row."""
    tokens = []
    for row in range(len(x)):
        of = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | {
            name: t[row].item() for name, t in settings.items()
        }
        if of["temperature"] == 0:
            tokens.append(int(x[row].argmax()))
        else:
            tokens.append(int(choose(x[row : row + 1].double(), u[row : row + 1].double(), **of)))
    return tokens


def test_each_row_has_its_own_settings():
    x, u = logits(64, 90), torch.rand(64, generator=torch.Generator().manual_seed(4))
    settings = settings_of(64)
    op = torch.ops.minfer.sample_rows
    assert op(x, u, *settings.values()).tolist() == by_row(x, u, settings)
    for name in SETTINGS:  # the others have their defaults
        alone = {name: settings[name]}
        assert op(x, u, *(alone.get(each) for each in SETTINGS)).tolist() == by_row(x, u, alone)
    for number in (0, 9):
        same = torch.Generator().manual_seed(number)
        found = sample(x, **settings | {"top_k": number}, generator=same)
        u = torch.rand(64, generator=torch.Generator().manual_seed(number))
        assert found.tolist() == by_row(x, u, settings | {"top_k": torch.full((64,), number)})
    wide = settings["top_k"].long()
    assert op(x, u, None, wide, None, None).equal(op(x, u, None, settings["top_k"], None, None))


def test_tokens_of_each_row_come_as_often_as_they_should():
    """Rows of one distribution, whose settings take turns."""
    row, draws = logits(1, 60), 8000 * len(CHOICES)
    columns = [torch.tensor(x).repeat(8000) for x in zip(*CHOICES, strict=True)]
    columns[1] = columns[1].int()
    tokens = sample(row.expand(draws, -1), *columns, generator=torch.Generator().manual_seed(1))
    for place, choice in enumerate(CHOICES):
        mine = tokens[place :: len(CHOICES)]
        p = kept_probabilities(row[0], *choice)
        statistic, most = chi_square(mine, p)
        assert statistic < most, choice


def test_settings_out_of_range_have_a_meaning():
    x, nan = logits(4, 60), float("nan")
    u = torch.rand(4, generator=torch.Generator().manual_seed(4))
    op, first = torch.ops.minfer.sample_rows, x.argmax(1).int()
    plain = op(x, u, None, None, None, None)
    assert op(x, u, torch.tensor([-1.0, nan, 0.0, -0.0]), None, None, None).equal(first)
    assert op(x, u, None, torch.tensor([-3, 0, 60, 1 << 30], dtype=torch.int32), None, None).equal(plain)
    assert op(x, u, None, None, torch.tensor([1.5, nan, 1.0, 7.0]), None).equal(plain)
    assert op(x, u, None, None, torch.tensor([0.0, -1.0, 1e-9, -0.0]), None).equal(first)
    assert op(x, u, None, None, None, torch.tensor([-1.0, nan, 0.0, -7.0])).equal(plain)
    assert op(x, u, None, None, None, torch.tensor([1.0, 2.0, 7.0, 1.0])).equal(first)
    wide = torch.tensor([1 << 32, (1 << 32) + 1, 1 - (1 << 32), 1 << 62])  # of whose low 32 bits several are 0 or 1
    assert op(x, u, None, wide, None, None).equal(plain)
    alike = {"temperature": torch.ones(4), "generator": torch.Generator().manual_seed(4)}
    assert sample(x, top_k=(1 << 32) + 1, **alike).equal(plain)  # u is the generator's first numbers
    ties = torch.zeros(4, 5)
    assert op(ties, u, torch.zeros(4), None, None, None).tolist() == [0] * 4


def test_mistakes_of_settings_are_a_sentence_each():
    x, u = logits(), torch.full((5,), 0.5)
    for settings, said in (
        (
            {"temperature": u[:3]},
            r"temperature of float32 and the shape \(5,\), got torch.float32, \(3,\)",
        ),
        ({"top_k": u}, "top_k of int32 or int64, got torch.float32"),
        ({"top_p": u.double()}, r"top_p of float32 and the shape \(5,\), got torch.float64, \(5,\)"),
        ({"min_p": u.to("meta")}, "min_p on the device of logits, cpu, got meta"),
        ({"min_p": u, "top_p": 0.0}, r"top_p above 0 and at most 1, got 0.0"),
        ({"min_p": u, "temperature": -1.0}, r"a temperature from 0, got -1.0"),
    ):
        with pytest.raises(ValueError, match=f"^minfer.sample takes {said}$"):
            sample(x, **settings)


def test_settings_of_rows_are_an_op_like_pytorchs_own():
    settings = settings_of(5)
    op = torch.ops.minfer.sample_rows.default
    torch.library.opcheck(op, (logits(), torch.full((5,), 0.5), *settings.values()))
    torch.library.opcheck(op, (logits(), torch.full((5,), 0.5), None, settings["top_k"], None, None))
