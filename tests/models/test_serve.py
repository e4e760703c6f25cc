"""Requests that are served together get the tokens that each gets alone."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import pytest
import torch

from minfer.models.model import Decoder
from minfer.models.pages import Pages
from minfer.models.serve import POLICIES, Engine, Request, RequestError, Sampling
from tests.models import tiny

Asked = tuple[list[int], Sampling]
SETTINGS = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.01},
]


@cache
def decoder(family: str = "llama") -> Decoder:
    """Whose texts do not repeat a few tokens."""
    return tiny.decoder(family, most=0.4, num_hidden_layers=2, tie_word_embeddings=False)


def draw(count: int, seed: int, longest: int = 40, most: int = 12) -> list[Asked]:
    """Requests of random lengths and settings."""
    rng = random.Random(seed)
    lengths = [(rng.randint(1, longest), rng.randint(1, most)) for _ in range(count)]
    return [
        (tiny.prompt(prompt, seed + i), Sampling(tokens, **{"seed": i, **SETTINGS[i % len(SETTINGS)]}))
        for i, (prompt, tokens) in enumerate(lengths)
    ]


def serve(asked: list[Asked], family: str = "llama", **how: int | bool) -> tuple[list[Request], Engine]:
    engine = Engine(decoder(family), **{"pages": 200, "page": 16, "chunk": 64, "most": 8, **how})
    requests = [engine.submit(*each) for each in asked]
    engine.run()
    assert all(request.done for request in requests)
    assert engine.pages.free == engine.pages.count, "pages were lost"
    return requests, engine


def alone(asked: list[Asked], family: str = "llama") -> list[list[int]]:
    """The tokens of each request when it is the only one, its prompt computed at once, nothing shared."""
    return [serve([each], family, share=False, chunk=512, pages=8)[0][0].tokens for each in asked]


def test_a_trace_of_fifty_requests_gives_the_tokens_of_each_alone():
    asked = draw(50, seed=11, most=8)
    requests, _ = serve(asked)
    assert [request.tokens for request in requests] == alone(asked)
    assert [len(request.tokens) for request in requests] == [sampling.max_tokens for _, sampling in asked]
    assert len({tuple(request.tokens[:3]) for request in requests}) > 30, "texts so alike would prove little"


@pytest.mark.parametrize("share", [False, True])
def test_requests_that_give_their_pages_back_get_the_same_tokens(share):
    asked = draw(6, seed=5, longest=30, most=30)
    requests, _ = serve(asked, pages=8, share=share)
    assert sum(request.preempted for request in requests) > 0
    assert [request.tokens for request in requests] == alone(asked)


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_gives_the_same_tokens(policy):
    asked = draw(9, seed=31, longest=60)
    engine = Engine(decoder(), pages=200, page=16, chunk=32, most=4, policy=policy)
    requests, mixed, joined = [engine.submit(*each) for each in asked], False, False
    while plan := (engine.next or engine._prepare(engine._plan())):
        engine.next = plan
        counts = [request.left > 1 for request, _ in plan.plan]
        mixed |= len(set(counts)) > 1
        joined |= any(r.computed and len(r.tokens) for r in engine.running) and any(
            not r.computed for r in engine.running
        )
        engine.step()
    assert [request.tokens for request in requests] == alone(asked)
    assert mixed == (policy != "prompts_first")
    assert joined == (policy != "batch_by_batch")


@pytest.mark.parametrize("page", [1, 8, 64, 128])
@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_pages_of_any_power_of_two_give_the_same_tokens(family, page):
    common = tiny.prompt(30)
    asked = [(common + prompt, sampling) for prompt, sampling in draw(4, seed=17, longest=50, most=10)]
    expected = alone(asked, family)  # with pages of 16
    for pages in (800 // page + 8, -(-120 // page)):  # for all requests, and for about one
        requests, _ = serve(asked, family, page=page, pages=pages, chunk=16, graphs=True)
        assert [request.tokens for request in requests] == expected
    assert page > len(common) or sum(request.reused for request in requests) >= len(common) // page * page


def test_the_beginning_of_a_text_is_computed_once():
    common = tiny.prompt(50)
    asked = [(common + tiny.prompt(3 + i, 9 + i), Sampling(6)) for i in range(3)] + [(common[:48], Sampling(4))]
    requests, engine = serve(asked, most=1)
    assert [request.reused for request in requests] == [0, 48, 48, 32]  # the last token is always computed
    assert [request.tokens for request in requests] == alone(asked)
    again = engine.submit(*asked[1])
    engine.run()
    assert (again.reused, again.tokens) == (48, requests[1].tokens)


def test_steps_that_are_filled_up_to_a_bucket_give_the_same_tokens():
    asked = draw(5, seed=2)
    requests, engine = serve(asked, graphs=True)
    assert [request.tokens for request in requests] == alone(asked)
    assert len(engine.graphs.captured) > 2


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in tiny.CONFIGS if family != "llama"])
def test_every_family_is_served_with_the_tokens_of_each_alone(family):
    asked = draw(20, seed=13, most=12)
    expected = alone(asked, family)
    for how in ({}, {"pages": 9, "graphs": True}, {"pages": 9, "share": False, "chunk": 16}):
        requests, _ = serve(asked, family, **how)
        assert [request.tokens for request in requests] == expected
        assert (sum(request.preempted for request in requests) > 0) == ("pages" in how)


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_in_bf16_each_token_is_about_the_likeliest(family):
    """Tokens may differ from those of a request alone where two are about as likely; none is far from the likeliest."""
    model = tiny.decoder(family, torch.bfloat16, most=0.2, num_hidden_layers=2, tie_word_embeddings=False)
    engine = Engine(model, pages=6, page=64, chunk=32, most=5, graphs=True)
    requests = [engine.submit(tiny.prompt(length, length), Sampling(12)) for length in (70, 3, 33, 52, 18, 60, 1)]
    engine.run()
    assert all(len(request.tokens) == 12 for request in requests)
    exact = tiny.decoder(family, most=0.2, num_hidden_layers=2, tie_word_embeddings=False)
    for request in requests:
        count = len(request.prompt)
        found = tiny.run(exact, [request.text], [[count]] + [[1]] * 11)[0]
        for i, token in enumerate(request.tokens):
            row = found[count - 1 + i]
            assert row.max() - row[token] <= 0.15 * row.std()


def test_greedy_tokens_are_the_largest_logits():
    (request,), _ = serve([(tiny.prompt(20), Sampling(5))])
    found = tiny.run(decoder(), [request.text], [[20], [1], [1], [1], [1]])[0]
    assert request.tokens == [int(found[19 + i].argmax()) for i in range(5)]


WRONG = [
    ([5] * 300, Sampling(20), "prompt and max_tokens of at most 256 tokens together, .* got 300 and 20"),
    ([], Sampling(), "token ids, Python ints from 0 to 96, got none"),
    ([5, 97], Sampling(), "token ids, Python ints from 0 to 96, got 97"),
    ([5, "a"], Sampling(), "got 'a'"),
    (torch.tensor([5]), Sampling(), r"Python ints from 0 to 96, got tensor\(5\)"),
    ([5], Sampling(0), "max_tokens as an int from 1, got 0"),
    ([5], Sampling(4, temperature=-1.0), "temperature as a finite number from 0, got -1.0"),
    ([5], Sampling(4, temperature="hot"), "temperature as a finite number from 0, got 'hot'"),
    ([5], Sampling(4, top_k=-1), "top_k as an int from 0, got -1"),
    ([5], Sampling(4, top_p=0.0), "top_p as a number above 0 and at most 1, got 0.0"),
    ([5], Sampling(4, min_p=float("nan")), "min_p as a number from 0 to 1, got nan"),
    ([5], Sampling(4, seed=None), "seed as an int, got None"),
    ([5], Sampling(4, seed=[1]), r"seed as an int, got \[1\]"),
    ([5], Sampling(4, stop=7), "stop as None or a tuple of ids, Python ints, got 7"),
    ([5], Sampling(4, stop=(torch.tensor([1, 2]),)), r"stop as None or a tuple of ids, Python ints, got \(tensor"),
]


def test_a_bad_request_gets_a_sentence_and_the_others_go_on():
    engine = Engine(decoder(), pages=16, page=16)
    good = tiny.prompt(20), Sampling(5)
    first, bad, last = engine.submit(*good), [engine.submit(*each[:2]) for each in WRONG], engine.submit(*good)
    with pytest.raises(RequestError, match=WRONG[0][2]):
        list(engine.stream(bad[0]))
    engine.run()
    assert first.tokens == last.tokens == alone([good])[0]
    for request, (*_, message) in zip(bad, WRONG, strict=True):
        assert request.done and not request.tokens
        assert re.search(message, request.error)


@pytest.mark.parametrize("at", ["_plan", "_prepare", "_make_room", "_choose", "_look_ahead", "_take", "_stop"])
def test_requests_go_on_after_an_interrupted_step(monkeypatch, at):
    """Ctrl-C in a notebook, or an allocation that failed: no token is lost, and none comes twice."""
    asked = draw(6, seed=5)
    engine = Engine(decoder(), pages=200, page=16, chunk=20, most=8)
    requests, whole, calls = [engine.submit(*each) for each in asked], getattr(engine, at), 0

    def interrupt(*given):
        nonlocal calls
        calls += 1
        if calls % 3 == 2:
            raise KeyboardInterrupt
        found = whole(*given)
        if calls % 3 == 0:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(engine, at, interrupt)
    for _ in range(6):
        with pytest.raises(KeyboardInterrupt):
            engine.run()
    monkeypatch.undo()
    engine.run()
    assert all(request.done for request in requests)
    assert [request.tokens for request in requests] == alone(asked)
    assert engine.pages.free == 200


def test_threads_stream_from_one_engine():
    asked = draw(6, seed=6)
    engine = Engine(decoder(), pages=200, page=16)
    with ThreadPoolExecutor(len(asked)) as threads:
        found = list(threads.map(lambda each: list(engine.stream(engine.submit(*each))), asked))
    assert found == alone(asked)


def test_a_stream_has_the_tokens_that_came_while_it_waited():
    asked = draw(1, seed=9, most=9)
    engine = Engine(decoder(), pages=40, page=16)
    stream = engine.stream(engine.submit(*asked[0]))
    first = next(stream)
    engine.run()  # as another thread may
    assert [first, *stream] == alone(asked)[0]


def test_an_interrupted_cancel_leaks_no_page(monkeypatch):
    asked = draw(3, seed=8, most=9)
    engine = Engine(decoder(), pages=40, page=16)
    requests = [engine.submit(*each) for each in asked]
    engine.step()

    def interrupt(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.pages, "release", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.cancel(requests[1])
    monkeypatch.undo()
    engine.cancel(requests[1])
    engine.run()
    expected = alone(asked)
    assert [requests[0].tokens, requests[2].tokens] == [expected[0], expected[2]]
    assert requests[1].done and engine.pages.free == 40


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"page": 24}, "pages whose number of tokens is a power of two, got 24"),
        ({"page": 0}, "a power of two, got 0"),
        ({"most": 0}, "most from 1"),
        ({"chunk": 3}, "to chunk"),
        ({"policy": "fair"}, "a policy of continuous, prompts_first, batch_by_batch, got 'fair'"),
    ],
)
def test_an_engine_refuses_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        Engine(decoder(), **{"pages": 4, "page": 16, **sizes})


def test_tokens_are_streamed_while_others_are_served_and_a_caller_may_stop():
    asked = draw(3, seed=7, most=9)
    expected = alone(asked)
    engine = Engine(decoder(), pages=40, page=16)
    requests = [engine.submit(*each) for each in asked]
    assert list(engine.stream(requests[0])) == expected[0]
    assert requests[1].tokens
    stream = engine.stream(requests[2])
    assert next(stream) == expected[2][0]
    stream.close()
    engine.run()
    assert requests[1].tokens == expected[1]
    assert requests[2].done and requests[2].tokens == expected[2][: len(requests[2].tokens)]
    assert engine.pages.free == 40


def test_a_stop_token_ends_an_answer_and_is_no_part_of_it():
    prompt = tiny.prompt(20)
    tokens = alone([(prompt, Sampling(10))])[0]
    stop = tokens[4]
    (request,), _ = serve([(prompt, Sampling(10, stop=(stop,)))])
    assert request.tokens == tokens[: tokens.index(stop)]


def test_a_step_that_was_prepared_too_early_is_prepared_again():
    """The next step is prepared before its tokens are known. Here stop tokens end answers, and requests come and go."""
    asked = draw(12, seed=21, longest=60, most=14)
    whole = alone(asked)
    stops = [(tokens[len(tokens) // 2],) if i % 2 else () for i, tokens in enumerate(whole)]
    ended = [tokens[: tokens.index(stop[0])] if stop else tokens for tokens, stop in zip(whole, stops, strict=True)]
    for pages in (200, 8):
        engine = Engine(decoder(), pages=pages, page=16, chunk=64, most=8, graphs=True)
        requests, cancelled, prepared = [], [], 0
        for (prompt, sampling), stop in zip(asked, stops, strict=True):
            requests.append(engine.submit(prompt, replace(sampling, stop=stop)))
            cancelled.append(engine.submit(prompt, sampling))
            prepared += engine.step() and engine.next is not None
            engine.step()
            engine.cancel(cancelled[-1])
        engine.run()
        assert [request.tokens for request in requests] == ended
        for request, tokens in zip(cancelled, whole, strict=True):
            assert request.done and request.tokens == tokens[: len(request.tokens)]
        assert prepared and engine.pages.free == pages


def test_pages_are_given_to_one_text_each_and_found_by_their_text():
    rng, pages, held = random.Random(4), Pages(12, 4), []
    for _ in range(400):
        if held and rng.random() < 0.45:
            pages.release(held.pop(rng.randrange(len(held)))[1])
            continue
        text = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
        keys = pages.keys_of(text)
        found = pages.find(keys)
        if len(keys) - len(found) > pages.free:
            pages.release(found)
            continue
        mine = found + [pages.take() for _ in keys[len(found) :]]
        for number, key in zip(mine, keys, strict=True):
            pages.keep(number, key)
        held.append((text, mine))
        for number in range(12):
            texts = {tuple(text[: 4 * mine.index(number) + 4]) for text, mine in held if number in mine}
            assert len(texts) <= 1 and pages.users[number] == sum(number in mine for _, mine in held)
    for _, mine in held:
        pages.release(mine)
    assert pages.free == 12
    for _ in range(12):
        pages.take()
    with pytest.raises(IndexError, match="no page is free"):
        pages.take()


def test_a_request_that_shares_nothing_reuses_nothing():
    asked = [(tiny.prompt(40), Sampling(3))] * 2
    requests, _ = serve(asked, most=1, share=False)
    assert [request.reused for request in requests] == [0, 0]
    assert torch.equal(torch.tensor(requests[0].tokens), torch.tensor(requests[1].tokens))
