"""The decoder on a GPU: near what the CPU computes, and with CUDA graphs what it computes without."""

from __future__ import annotations

import json

import pytest
import torch

from minfer.models import families, weights
from minfer.models.batch import batch
from minfer.models.batch import cache as new_cache
from minfer.models.graphs import Graphs, can_be_captured
from minfer.models.serve import Engine
from tests.models import test_serve, tiny
from tests.models.test_model import check_padding
from tests.models.test_transformers import BOUNDS, EXPECTED

pytestmark = pytest.mark.gpu


def decoder(family: str, dtype: torch.dtype, most: float = 0.1, **other: object):
    """With the weights of the CPU's tests: they are integers at first, and so the same on each device."""
    config = tiny.config_of(family, **other)
    return weights.build(families.parse(config), tiny.Hashed(config, most), "cuda", dtype)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_logits_are_near_those_that_transformers_computes(family, dtype):
    expected = torch.tensor(json.loads(EXPECTED.read_text())[family])
    for page in (8, 16, 64):
        found = tiny.run(decoder(family, dtype), [tiny.prompt(40)], [[30], [1], [6], [1], [1], [1]], page)[0]
        assert tiny.error(found[39].cpu(), expected) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_a_graph_is_replayed_with_other_tokens_lengths_and_pages(family, dtype):
    model = decoder(family, dtype)
    if not can_be_captured(model):
        pytest.skip("experts in fp32 wait for the device")
    sequences, pages = tiny.place([tiny.prompt(90, 1), tiny.prompt(50, 2), tiny.prompt(60, 3)], 16)
    cache = new_cache(model.config, pages, 16, model.device, dtype)
    graphs = Graphs(model, cache)
    for each, count in zip(sequences, (70, 30, 9), strict=True):
        model.forward(batch([each.piece(count)], 16, model.device), cache)
    for chosen in ([0, 1, 2], [2, 0], [1], [2, 1, 0], [0, 1], [2]):
        pieces = [sequences[i].piece(1) for i in chosen]
        got = graphs(batch(pieces, 16, model.device, pad=True))[: len(chosen)].clone()
        assert (
            tiny.error(got, model.forward(batch(pieces, 16, model.device), cache))
            <= {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
        )


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_a_padded_step_gives_the_same_logits(family):
    check_padding(decoder(family, torch.bfloat16), 1e-2)


def test_requests_get_the_same_tokens_with_graphs_and_without():
    model = decoder("llama", torch.float32, most=0.4, num_hidden_layers=2)
    asked, made = test_serve.draw(20, seed=11), []
    for graphs in (True, False):
        engine = Engine(model, pages=30, page=16, chunk=64, most=8, graphs=graphs)
        requests = [engine.submit(*each) for each in asked]
        engine.run()
        made.append([request.tokens for request in requests])
    assert made[0] == made[1]
