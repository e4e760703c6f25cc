"""`examples/generate.py` continues a text, of a checkpoint or of a name, and says in a sentence what it cannot do."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tests.conftest import ROOT
from tests.models import tiny


def example():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "examples" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_name_needs_no_checkpoint(capsys):
    example().main(["tiny", "Hello", "--max-tokens", "5", "--device", "cpu"])
    out, err = capsys.readouterr()
    assert len([int(word) for word in out.split()]) == 5 and err.startswith("5 tokens in ")


def test_a_checkpoint_answers_in_text(capsys, tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers: pip install 'minfer[models]'")
    pytest.importorskip("safetensors", reason="needs safetensors: pip install 'minfer[models]'")
    folder = tiny.checkpoint("llama", tmp_path / "llama", most=0.4, num_hidden_layers=1)
    words = {f"w{number}": number for number in range(97)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    how = [str(folder), "w5 w9 w11", "--max-tokens", "6", "--device", "cpu"]
    example().main(how)
    out, err = capsys.readouterr()
    assert len(out.split()) == 6 and set(out.split()) <= set(words) and "loading: 0.0 of 0.0 GB" in err
    example().main(how)
    assert capsys.readouterr().out == out

    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(SystemExit, match=r"generate: .*tokenizer\.json cannot be read as a tokenizer"):
        example().main(how)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "Hello"], "generate: nowhere is neither a file, a folder nor one of the names tiny"),
        (["tiny", ""], "generate: a request takes a prompt of token ids, Python ints from 0 to 255, got none"),
        (
            ["tiny", "Hello", "--max-tokens", "999999999999"],
            "generate: a request takes prompt and max_tokens of at most 2048 tokens together",
        ),
        (["tiny", "Hello", "--max-tokens", "0"], "generate: a request takes max_tokens as an int from 1, got 0"),
        (
            ["tiny", "Hello", "--top-p", "3"],
            "generate: a request takes top_p as a number above 0 and at most 1, got 3.0",
        ),
        (["tiny", "Hello", "--weights", "fp8"], "generate: weights of fp8 take a dtype of float16 or bfloat16"),
    ],
)
def test_what_it_cannot_do_is_one_sentence(words, message):
    with pytest.raises(SystemExit, match=message):
        example().main([*words, "--device", "cpu"])


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SystemExit, match=r"needs the package tokenizers: pip install 'minfer\[models\]'"):
        example().main([str(tmp_path), "Hello"])


@pytest.mark.parametrize(("device", "message"), [("cuda:99", "sees no such GPU"), ("gpu", "it takes cpu, cuda")])
def test_a_device_that_is_not_there_is_named(device, message, capsys):
    with pytest.raises(SystemExit):
        example().main(["tiny", "Hello", "--device", device])
    assert message in capsys.readouterr().err
