"""A mistake on the command line is one sentence that says what to write."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from minfer.plan.config import Config, UserError, groups
from tests.cli.composing import HGEMM, compose, refusal
from tests.conftest import ROOT
from tests.tiers import mostly_slow

MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    # what is wrong: (words, what the message must name: the key or value, and a valid word)
    "no sweep": ([], ["sweep", "+sweep=hgemm"]),
    "sweep without plus": (["sweep=hgemm"], ["'sweep'", "+sweep="]),
    "two sweeps": (["+sweep=hgemm,rmsnorm"], ["'sweeps=[hgemm,rmsnorm]'"]),
    "a sweep twice": (["+sweep=hgemm", "+sweep=rmsnorm"], ["'sweeps=[hgemm,rmsnorm]'"]),
    "two sweeps in brackets": (["+sweep=[hgemm,rmsnorm]"], ["'sweeps=[hgemm,rmsnorm]'"]),
    "two shapes": ([HGEMM, "shape=llama,tiny"], ["shape takes one"]),
    "unknown flag": ([HGEMM, "--bogus", "timing=quick"], ["unknown flag '--bogus'; valid: --help, --version"]),
    "misspelt flag": ([HGEMM, "--multrun"], ["'--multrun'", "did you mean --multirun?"]),
    "key with dashes": ([HGEMM, "--dry-run"], ["'--dry-run'", "write dry_run=..."]),
    "flag without its value": ([HGEMM, "--config-dir"], ["--config-dir", "expected one argument"]),
    "no results": ([HGEMM, "results="], ["results is empty", "results=results"]),
    "no runs": ([HGEMM, "runs="], ["runs is empty", "runs=runs"]),
    "a shape that is no list": (
        [HGEMM, "shape.cpu={m: 3, n: 4, k: 5}"],
        ["it takes a list", "'shape.cpu=[{m: 3, n: 4, k: 5}]'"],
    ),
    "unknown sweep": (["+sweep=hgem"], ["sweep", "'hgem'", "hgemm"]),
    "unknown shape set": ([HGEMM, "shape=lama"], ["shape", "'lama'", "llama"]),
    "unknown preset": ([HGEMM, "timing=quik"], ["timing", "'quik'", "quick"]),
    "unknown cluster": ([HGEMM, "cluster=l40"], ["cluster", "'l40'", "l40s"]),
    "unknown container": ([HGEMM, "container=aptainer"], ["container", "'aptainer'", "apptainer"]),
    "unknown profiler": ([HGEMM, "profiler=statik"], ["profiler", "'statik'", "static"]),
    "unknown profiler in a list": ([HGEMM, "profiler=[static,nuc]"], ["profiler", "'nuc'", "ncu"]),
    "two profilers without brackets": ([HGEMM, "profiler=static,none"], ["profiler", "[static,none]"]),
    "line break in a partition": ([HGEMM, "cluster.partition='a\nb'"], ["cluster.partition", "line breaks"]),
    "backslash in an option of sbatch": (
        [HGEMM, "+cluster.flags.comment='a\\\\b'"],
        ["cluster.flags.comment", "backslash"],
    ),
    "no option of sbatch": ([HGEMM, "+cluster.flags.a_b=c"], ["cluster.flags", "'a_b'", "reservation"]),
    "key of a profiler": (
        [HGEMM, "profiler=static", "profiler.static.arch=[sm_89]"],
        ["profiler.static.arch", "archs"],
    ),
    "key of a profiler with plus": (
        [HGEMM, "profiler=static", "+profiler.static.foo=1"],
        ["profiler.static.foo", "archs"],
    ),
    "calls of a profiler": (
        [HGEMM, "profiler=torch", "profiler.torch.calls=0"],
        ["profiler.torch.calls", "0", "from 1"],
    ),
    "key of a profiler not chosen": ([HGEMM, "profiler.static.archs=[sm_89]"], ["profiler.static", "profiler=static"]),
    "text for architectures": (
        [HGEMM, "profiler=static", "profiler.static.archs=sm_89"],
        ["profiler.static.archs", "list"],
    ),
    "nothing near": ([HGEMM, "timing=zzz"], ["timing", "'zzz'", "default", "quick"]),
    "group": ([HGEMM, "shap=llama"], ["'shap'", "shape"]),
    "key": ([HGEMM, "kernal=[torch]"], ["'kernal'", "kernel"]),
    "nested key": ([HGEMM, "timing.steady_blok_s=1"], ["'timing.steady_blok_s'", "steady_block_s"]),
    "key of a cluster": ([HGEMM, "cluster.partion=gpu"], ["'cluster.partion'", "partition"]),
    "parent of a nested key": ([HGEMM, "parms.layout=TN"], ["'parms'", "params"]),
    "parameter": ([HGEMM, "params.layot=TN"], ["'params.layot'", "did you mean params.layout?"]),
    "key of draw": ([HGEMM, "draw.seeed=2"], ["'draw.seeed'", "did you mean draw.seed?"]),
    "new key with plus": ([HGEMM, "+foo=1"], ["'foo'", "kernel", "shape", "timing"]),
    "new key with two": ([HGEMM, "++kernels=torch"], ["'kernels'", "kernel"]),
    "new nested key with plus": ([HGEMM, "+shape.foo=1"], ["'shape.foo'", "cpu", "gpu"]),
    "new parameter with plus": ([HGEMM, "+params.foo=1"], ["'params.foo'", "accumulate", "layout"]),
    "text for a float": ([HGEMM, "timing.precision=abc"], ["'timing.precision'", "'abc'", "Float"]),
    "text for an int": ([HGEMM, "cluster.cpus=many"], ["'cluster.cpus'", "'many'", "Integer"]),
    "fraction for an int": ([HGEMM, "cluster.cpus=1.5"], ["'cluster.cpus'", "1.5", "Integer"]),
    "text for a bool": ([HGEMM, "resume=maybe"], ["'resume'", "'maybe'", "bool"]),
    "number for a list": ([HGEMM, "timing.looks=5"], ["'timing.looks'", "list"]),
    "text for a list": ([HGEMM, "cluster.setup=lines"], ["'cluster.setup'", "list", "cluster.setup=[lines]"]),
    "two files without brackets": ([HGEMM, "extra=a.py,b.py"], ["'extra=[a.py,b.py]'"]),
    "text in a list of ints": ([HGEMM, "timing.looks=[10,soon]"], ["timing.looks[1]", "'soon'", "Integer"]),
    "number for a mapping": ([HGEMM, "params=5"], ["'params'", "int"]),
    "number for shapes": ([HGEMM, "shape.cpu=5"], ["'shape.cpu'", "list"]),
    "null for a number": ([HGEMM, "timing.warmup_s=null"], ["'timing.warmup_s'", "Optional"]),
    "null for a group": ([HGEMM, "timing=null"], ["timing", "default", "quick"]),
    "number for a group": ([HGEMM, "timing=5"], ["timing", "5", "default", "quick"]),
    "deleted key": ([HGEMM, "~timing.looks"], ["timing.looks"]),
    "deleted op": ([HGEMM, "~op"], ["+sweep=hgemm"]),
    "deleted dtype": ([HGEMM, "~dtype"], ["dtype", "dtype=..."]),
    "deleted group": ([HGEMM, "~shape"], ["shape is not set", "shape=..."]),
    "no rounds": ([HGEMM, "timing.looks=[]"], ["timing.looks", "[]", "[30,60,120]"]),
    "rounds from nought": ([HGEMM, "timing.looks=[0,10]"], ["timing.looks", "[0, 10]"]),
    "rounds that fall": ([HGEMM, "timing.looks=[60,30]"], ["timing.looks", "rising"]),
    "not a number": ([HGEMM, "timing.warmup_s=nan"], ["timing.warmup_s", "nan"]),
    "for ever": ([HGEMM, "timing.steady_block_s=inf"], ["timing.steady_block_s", "inf"]),
    "time before now": ([HGEMM, "timing.cold_cap_s=-1"], ["timing.cold_cap_s", "-1"]),
    "exactly": ([HGEMM, "timing.precision=0"], ["timing.precision", "above 0"]),
    "no time": ([HGEMM, "case_timeout_s=0"], ["case_timeout_s", "above 0"]),
    "no jobs": ([HGEMM, "cluster.max_jobs=0"], ["cluster.max_jobs", "from 1"]),
    "interpolation": ([HGEMM, "kernel=${kernal}"], ["'kernel'", "'kernal'"]),
    "open bracket": ([HGEMM, "kernel=[v01_naive"], ["kernel", "[v01_naive"]),
    "list cut by a space": ([HGEMM, "kernel=[v01_naive,", "torch]"], ["kernel=[v01_naive,"]),
    "list without brackets": ([HGEMM, "dtype=float16,bfloat16"], ["dtype=float16,bfloat16", "["]),
    "two equals signs": ([HGEMM, "kernel==torch"], ["kernel==torch"]),
    "no equals sign": ([HGEMM, "llama"], ["'llama'"]),
    "sweep as a word": (["hgemm"], ["'hgemm'", "did you mean +sweep=hgemm?"]),
    "a dtype for several sweeps": (["+sweep=decoder_ops", "dtype=float16"], ["dtype cannot be set", "+sweep="]),
    "a shape for several sweeps": (["+sweep=decoder_ops", "shape=llama"], ["shape cannot be set", "+sweep="]),
    "a kernel for several sweeps": (["+sweep=decoder_ops", "kernel=torch"], ["kernel cannot be set", "+sweep="]),
    "group twice": ([HGEMM, "+shape=llama"], ["shape"]),
}


# Found as another is, of which only the key differs: composing takes a tenth of a second.
LIKE_ANOTHER = {
    *(
        "unknown preset",
        "unknown cluster",
        "unknown container",
        "key of a cluster",
        "parent of a nested key",
        "no runs",
    ),
    *("text for an int", "number for shapes", "a shape for several sweeps", "a kernel for several sweeps"),
}


@pytest.mark.parametrize("mistake", mostly_slow(MISTAKES, lambda mistake: mistake not in LIKE_ANOTHER))
def test_a_mistake_is_one_sentence_that_names_it(mistake: str) -> None:
    words, named = MISTAKES[mistake]
    message = refusal(*words)
    assert [word for word in named if word not in message] == [], message
    assert not re.search(r"\w(Error|Exception)", message), message  # the words of a programmer


def test_a_key_that_is_there_twice_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    """The last one counts, as Hydra has it: a script may add the user's words to its own."""
    for words, said in (
        (["kernel=torch", "kernel=cpu_naive"], "kernel=cpu_naive counts; for both write 'kernel=[torch,cpu_naive]'."),
        (["+params.layout=[TN,NN]", "params.layout=TN"], "write 'params.layout=[TN,NN,TN]'."),
        (["timing=quick", "timing=cold"], "Note: timing is there twice, and timing=cold counts."),
        (["draw.seed=1", "++draw.seed=2"], "Note: draw.seed is there twice, and draw.seed=2 counts."),
        (["dtype=float16", "dtype=float16"], ""),
    ):
        compose(HGEMM, *words)
        told = capsys.readouterr().err
        assert told.endswith(f"{said}\n") if said else not told


def test_the_nearest_word_is_proposed_before_a_list_of_all() -> None:
    assert "did you mean quick?" in refusal(HGEMM, "timing=quik")
    assert "valid: cold, default, quick" in refusal(HGEMM, "timing=zzz")


KEYS = sorted({*Config.__dataclass_fields__, *groups(), "timing.looks", "shape.cpu", "params.layout", "cluster.setup"})
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
AWKWARD = st.sampled_from(
    ["", "null", "???", "5", "-1", "1e999", "nan", "true", "[", "]", "[]", "{}", "[[1]]", "{a:1}", "{1:2}", "a,b", "'", '"',
     "${", "${x}", "${timing}", "${oc.env:X}", "\\", "=", "a=b", "..", "../x", "/", "@", "range(3)", "choice(1)", "\x00"]
)  # fmt: skip

# Examples are short, and shrinking one takes minutes of composing.
FUZZ = settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])


def composes_or_refuses(*words: str) -> None:
    """Anything but a UserError is a traceback for the user."""
    try:
        compose(*words)
    except UserError as error:
        assert str(error) and "\n" not in str(error)


@pytest.mark.slow
@settings(FUZZ)
@given(key=st.sampled_from(KEYS), value=TEXT | AWKWARD)
def test_no_value_gives_a_traceback(key: str, value: str) -> None:
    composes_or_refuses(HGEMM, f"{key}={value}")


@pytest.mark.slow
@settings(FUZZ)
@given(prefix=st.sampled_from(["", "+", "++", "~"]), key=TEXT | AWKWARD, value=AWKWARD | st.just("1"))
def test_no_key_gives_a_traceback(prefix: str, key: str, value: str) -> None:
    word = f"{prefix}{key}={value}"
    if not word.startswith("-"):  # flags are argparse's
        composes_or_refuses(HGEMM, word)


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    env = {name: value for name, value in os.environ.items() if name != "HYDRA_FULL_ERROR"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "minfer.launch", *words]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "+sweep=hgemm"),
        ([HGEMM, "timing=null"], "timing"),
        ([HGEMM, "cluster=local", "kernel=[v01_naiv]"], "'v01_naiv'"),  # found only once torch is there
    ],
    ids=["no sweep", "null group", "kernel"],
)
def test_a_mistaken_command_ends_with_status_2_and_one_line(words: list[str], named: str, tmp_path: Path) -> None:
    done = run(*words, cwd=tmp_path)
    assert "Traceback" not in done.stdout + done.stderr
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("minfer: ") and named in lines[0], done.stderr
    assert list(tmp_path.iterdir()) == []
