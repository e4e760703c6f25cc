"""The command line as a user meets it: what composes, and what a mistake sounds like."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from minfer import launch
from minfer.cli import ACTIONS
from minfer.plan.config import CONF, Config, Shape, UserError, groups, name_changes, parts, written
from minfer.shapes import OPS, named_sets

ROOT = Path(__file__).resolve().parents[2]
HGEMM = "+sweep=hgemm"


def compose(*words: str) -> list[Config]:
    """The requests that a command line composes to, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["minfer.launch", *words])
        patch.setenv("HYDRA_FULL_ERROR", "1")  # compose sets it; here it must not outlive the test
        if not {"--multirun", "-m"} & set(words):  # else Hydra composes twice, the first time to find this out
            patch.setattr(Hydra, "get_mode", lambda *_, **__: RunMode.RUN)
        GlobalHydra.instance().clear()
        return launch.compose()


def one(*words: str) -> Config:
    (config,) = compose(*words)
    return config


def refusal(*words: str) -> str:
    """The complaint about a command line."""
    with pytest.raises(UserError) as caught:
        compose(*words)
    message = str(caught.value)
    assert message and "\n" not in message
    return message


MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    # what is wrong: (words, what the message must name: the key or value, and a valid word)
    "no sweep": ([], ["sweep", "+sweep=hgemm"]),
    "sweep without plus": (["sweep=hgemm"], ["'sweep'", "+sweep="]),
    "two sweeps": (["+sweep=hgemm,rmsnorm"], ["'sweeps=[hgemm,rmsnorm]'"]),
    "two sweeps in brackets": (["+sweep=[hgemm,rmsnorm]"], ["'sweeps=[hgemm,rmsnorm]'"]),
    "two shapes": ([HGEMM, "shape=llama,tiny"], ["shape takes one"]),
    "unknown flag": ([HGEMM, "--bogus", "timing=quick"], ["unknown flag '--bogus'; valid: --help, --version"]),
    "misspelt flag": ([HGEMM, "--multrun"], ["'--multrun'", "did you mean --multirun?"]),
    "key with dashes": ([HGEMM, "--dry-run"], ["'--dry-run'", "write dry_run=..."]),
    "flag without its value": ([HGEMM, "--config-dir"], ["--config-dir", "expected one argument"]),
    "no results": ([HGEMM, "results="], ["results is empty", "results=results"]),
    "no runs": ([HGEMM, "runs="], ["runs is empty", "runs=runs"]),
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
    "parameter": ([HGEMM, "params.layot=TN"], ["'params.layot'", "layout"]),
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
    "sweep as a word": (["hgemm"], ["'hgemm'"]),
    "a dtype for several sweeps": (["+sweep=decoder_ops", "dtype=float16"], ["dtype cannot be set", "+sweep="]),
    "a shape for several sweeps": (["+sweep=decoder_ops", "shape=llama"], ["shape cannot be set", "+sweep="]),
    "a kernel for several sweeps": (["+sweep=decoder_ops", "kernel=torch"], ["kernel cannot be set", "+sweep="]),
    "group twice": ([HGEMM, "+shape=llama"], ["shape"]),
}


@pytest.mark.parametrize(("words", "named"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_sentence_that_names_it(words: list[str], named: list[str]) -> None:
    message = refusal(*words)
    assert [word for word in named if word not in message] == [], message
    assert not re.search(r"\w(Error|Exception)", message), message  # the words of a programmer


def test_the_nearest_word_is_proposed_before_a_list_of_all() -> None:
    assert "did you mean quick?" in refusal(HGEMM, "timing=quik")
    assert "valid: cold, default, quick" in refusal(HGEMM, "timing=zzz")


def test_defaults() -> None:
    config = one(HGEMM)
    assert (config.op, config.kernel, config.dtype) == ("hgemm", "all", ["float16", "bfloat16"])
    assert config.params == {"layout": "TN", "accumulate": "float32", "call": "product"}
    assert (config.shape.name, config.timing.name, config.cluster.name) == ("squares", "default", "auto")
    assert config.profiler.options() == {}
    assert (config.container.image, config.dry_run, config.resume, config.device) == (None, False, False, "auto")


OVERRIDES: dict[str, tuple[str, Any]] = {
    "cluster.flags={mail-type: END, exclude: node1}": ("cluster.flags", {"mail-type": "END", "exclude": "node1"}),
    "cluster.flags.mail-type=END": ("cluster.flags", {"mail-type": "END"}),
    "+cluster.flags.mail-type=END": ("cluster.flags", {"mail-type": "END"}),
    "notify=https://example.org/a?b=c&d=[e]": ("notify", "https://example.org/a?b=c&d=[e]"),
    "notify=mail -s \"$MINFER_TEXT\" 'me' </dev/null; {a,b}": (
        "notify",
        "mail -s \"$MINFER_TEXT\" 'me' </dev/null; {a,b}",
    ),
    "notify='a b'": ("notify", "a b"),
    "notify=null": ("notify", None),
    "kernel=torch": ("kernel", "torch"),
    "kernel=[v01_naive,torch]": ("kernel", ["v01_naive", "torch"]),
    "dtype=bfloat16": ("dtype", "bfloat16"),
    "dtype=[float16]": ("dtype", ["float16"]),
    "params.layout=[TN,NN]": ("params.layout", ["TN", "NN"]),
    "shape=llama": ("shape.name", "llama"),
    "timing=quick": ("timing.name", "quick"),
    "cluster=l40s": ("cluster.gres", "gpu:l40s:1"),
    "cluster.partition=gpu-a": ("cluster.partition", "gpu-a"),
    "cluster.max_jobs=16": ("cluster.max_jobs", 16),
    "cluster.setup=['module load cuda']": ("cluster.setup", ["module load cuda"]),
    "container=apptainer": ("container.image", "minfer.sif"),
    "container.binds=[/data]": ("container.binds", ["/data"]),
    "timing.steady_block_s=0.1": ("timing.steady_block_s", 0.1),
    "timing.steady_block_s=0": ("timing.steady_block_s", 0.0),
    "timing.looks=[10,20]": ("timing.looks", [10, 20]),
    "shape.cpu=[{m:8,n:8,k:8}]": ("shape.cpu", [{"m": 8, "n": 8, "k": 8}]),
    "shape.gpu=[{m:[1,16],n:8,k:8}]": ("shape.gpu", [{"m": [1, 16], "n": 8, "k": 8}]),
    "case_timeout_s=5": ("case_timeout_s", 5.0),
    "extra=my/kernels.py": ("extra", ["my/kernels.py"]),
    "extra=[my/kernels.py]": ("extra", ["my/kernels.py"]),
    "results=/scratch/me/results": ("results", "/scratch/me/results"),
    "dry_run=true": ("dry_run", True),
    "resume=yes": ("resume", True),
    "device=cpu": ("device", "cpu"),
    "profiler=static": ("profiler.static.archs", ["sm_89", "sm_90a"]),
    "profiler=[static]": ("profiler.static.archs", ["sm_89", "sm_90a"]),
    "profiler=[none,static]": ("profiler.static.archs", ["sm_89", "sm_90a"]),
    "profiler=[]": ("profiler.static", None),
    "profiler=torch": ("profiler.torch.calls", 3),
    "profiler=[static,torch]": ("profiler.torch.calls", 3),
    "profiler=proton": ("profiler.proton.instrument", False),
}


def overrides_together() -> list[tuple[str, ...]]:
    """The overrides in groups that change different keys of the top level: composing takes a quarter of a second."""
    found: list[dict[str, str]] = []
    for word in OVERRIDES:
        key = re.split(r"[.=]", word.lstrip("+"))[0]
        group = next((group for group in found if key not in group), None)
        if group is None:
            found.append(group := {})
        group[key] = word
    return [tuple(group.values()) for group in found]


@cache
def composed(words: tuple[str, ...]) -> Config:
    return one(HGEMM, *words)


@pytest.mark.parametrize(("word", "group"), [(word, group) for group in overrides_together() for word in group])
def test_an_override_reaches_the_config(word: str, group: tuple[str, ...]) -> None:
    key, expected = OVERRIDES[word]
    value: Any = composed(group)
    for name in key.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    assert value == expected and type(value) is type(expected)


def test_auto_is_static_and_ncu_where_there_is_a_gpu() -> None:
    for words in ((), ("profiler=[auto,static]",), ("profiler=auto",)):
        config = one(HGEMM, *words)
        config.profiler.resolve("cuda")
        assert list(config.profiler.options()) == ["static", "ncu"]
    config = one(HGEMM)
    config.profiler.resolve("cpu")
    assert config.profiler.options() == {}
    config = one(HGEMM, "profiler=none")
    config.profiler.resolve("cuda")
    assert config.profiler.options() == {}


def test_a_chosen_profiler_takes_options() -> None:
    config = one(HGEMM, "profiler=[static]", "profiler.static.archs=[sm_80]")
    assert config.profiler.options() == {"static": {"archs": ["sm_80"]}}


def test_overrides_combine_and_the_order_of_words_does_not_matter() -> None:
    words = ["shape.cpu=[{m:8,n:8,k:8}]", "timing.warmup_s=0", "cluster.cpus=2", "timing=quick", "shape=tiny", HGEMM]
    config = one(*words)
    assert config == one(*reversed(words))
    assert (config.shape.name, config.shape.cpu) == ("tiny", [{"m": 8, "n": 8, "k": 8}])
    assert (config.timing.name, config.timing.warmup_s, config.cluster.cpus) == ("quick", 0.0, 2)


def test_the_form_that_is_proposed_for_several_sweeps_composes() -> None:
    config = one("sweeps=[hgemm,rmsnorm]")
    assert [part.op for part in parts(config)] == ["hgemm", "rmsnorm"]


def test_multirun_is_one_request_for_each_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    configs = compose("--multirun", HGEMM, "dtype=float16,bfloat16")
    assert [config.dtype for config in configs] == ["float16", "bfloat16"]
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]  # Hydra's own notes, beside those of runs


@pytest.mark.parametrize("name", groups()["shape"])
def test_every_set_of_shapes_is_what_its_type_says_and_bears_its_name(name: str) -> None:
    """Without composing, which takes longer and which the sweeps do with half of them."""
    shape = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Shape), written("shape", name)))
    assert isinstance(shape, Shape) and shape.name == name
    assert (shape.op == "") == (name == "custom") and bool(shape.cpu and shape.gpu) == bool(shape.op)


def test_no_two_ops_have_a_set_of_shapes_of_the_same_name() -> None:
    names = [name for file in OPS.glob("*/shapes.yaml") for name in OmegaConf.to_container(OmegaConf.load(file))]
    assert sorted(names) == list(named_sets()) and len(names) >= 66
    assert {each["op"] for each in named_sets().values()} == {file.parent.name for file in OPS.glob("*/__init__.py")}


def test_a_set_of_shapes_that_an_op_brings_is_chosen_like_a_file() -> None:
    shape = one("+sweep=rmsnorm", "shape=rmsnorm_heads", "shape.cpu=[{tokens: 8, hidden: 128}]").shape
    assert (shape.name, shape.op) == ("rmsnorm_heads", "rmsnorm")
    assert shape.gpu == [{"tokens": [40, 5120, 81920, 655360], "hidden": 128}]
    assert shape.cpu == [{"tokens": 8, "hidden": 128}]


OTHERS = sorted(path for path in CONF.glob("*/*.yaml") if path.parent.name != "shape")


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_every_option_of_every_other_group_composes_and_bears_its_files_name(path: Path) -> None:
    group, option = path.parent.name, path.stem
    assert option in groups()[group]
    config = one(f"+sweep={option}") if group == "sweep" else one(HGEMM, f"{group}={option}")
    assert config.sweeps or (config.op and config.dtype)
    if group != "sweep":
        assert getattr(getattr(config, group), "name", option) == option


def test_help_lists_every_group_with_its_options_and_three_examples_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        compose("--help")
    assert not caught.value.code
    text = capsys.readouterr().out
    for group, options in groups().items():
        assert f"{group}: {', '.join(options)}" in text
    examples = [line.split("#")[0].split() for line in text.splitlines() if line.strip().startswith("minfer +")]
    assert len(examples) >= 3
    assert all(f"minfer {action} RUN" in text for action in ACTIONS)
    assert list(tmp_path.iterdir()) == []
    for words in examples:
        assert one(*words[1:]).op  # an example that does not work is worse than none


def test_cfg_job_prints_the_config_as_yaml_and_asks_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert compose("--cfg", "job", HGEMM, "timing=quick", "kernel=[torch]") == []
    shown = OmegaConf.create(capsys.readouterr().out)
    assert (shown.op, shown.kernel, shown.timing.name) == ("hgemm", ["torch"], "quick")
    assert OmegaConf.is_dict(shown) and set(shown) == set(Config.__dataclass_fields__)


@pytest.fixture
def theirs(tmp_path: Path) -> str:
    """A user's own options, and the flag that brings them in."""
    folder = tmp_path / "my own conf"
    files = {
        "sweep/mine": "# @package _global_\nop: hgemm\nkernel: [torch, cpu_naive]\ndtype: float16\n",
        "shape/small": "name: small\ncpu: [{m: 8, n: 8, k: [8, 16]}]\n",
        "shape/rmsnorm_tiny": "name: rmsnorm_tiny\ncpu: [{tokens: 3, hidden: 8}]\n",
        "shape/nameless": "cpu: [{m: 8, n: 8, k: 8}]\n",
        "shape/broken": "name: broken\ncpu: [{m: 8\n",
        "shape/misspelt": "name: misspelt\ncpus: []\n",
        "timing/faster": "defaults: [quick]\nname: faster\nwarmup_s: 0\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.yaml").write_text(text)
    return f"--config-dir={folder}"


def test_options_of_the_users_own(theirs: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = one(theirs, "+sweep=mine", "shape=small", "timing=faster", "cluster=local")
    assert (config.kernel, config.shape.name, config.cluster.name) == (["torch", "cpu_naive"], "small", "local")
    assert (config.timing.name, config.timing.warmup_s) == ("faster", 0)
    assert config.timing.looks == one(HGEMM, "timing=quick").timing.looks
    with pytest.raises(SystemExit):
        compose("--help", *theirs.split("=", 1))
    text = capsys.readouterr().out
    assert (
        f"sweep: {', '.join(sorted([*groups()['sweep'], 'mine']))}\n" in text
        and "cluster: auto, l40s, local, slurm\n" in text
    )


def test_a_file_of_the_users_own_stands_for_a_set_of_the_same_name(
    theirs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ConfigStore.instance()  # as in a process that has composed nothing:
    monkeypatch.setattr(store, "repo", {group: known for group, known in store.repo.items() if group != "shape"})
    assert one(theirs, "+sweep=rmsnorm", "shape=rmsnorm_tiny").shape.cpu == [{"tokens": 3, "hidden": 8}]
    assert one(theirs, "+sweep=rmsnorm", "shape=rmsnorm").shape.op == "rmsnorm"


def test_what_was_changed_of_the_users_own_preset_is_in_its_name(theirs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = one(theirs, "+sweep=mine", "timing=faster").timing
    changed = one(theirs, "+sweep=mine", "timing=faster", "timing.looks=[7]").timing
    monkeypatch.setattr(sys, "argv", ["minfer", theirs])
    assert name_changes(plain).name.startswith("faster") and "warmup_s" not in name_changes(plain).name
    assert "looks=[7]" in name_changes(changed).name.split()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], ["+sweep=hgemm or ", " or +sweep=mine"]),
        (["+sweep=min"], ["'min'", "did you mean mine?"]),
        (["+sweep=mine", "shape=smalll"], ["shape", "'smalll'", "did you mean small?"]),
        (["+sweep=mine", "shape=nameless"], ["shape", "line name:"]),
        (["+sweep=mine", "shape=broken"], ["my own conf/shape/broken.yaml, line 3", "correct the file"]),
        (["+sweep=mine", "shape=misspelt"], ["shape.cpus", "cpu"]),
    ],
)
def test_a_mistake_in_options_of_the_users_own(theirs: str, words: list[str], said: list[str]) -> None:
    for flag in ([theirs], theirs.split("=", 1)):
        message = refusal(*flag, *words)
        assert [word for word in said if word not in message] == [], message


def test_a_folder_of_options_that_is_not_there(tmp_path: Path) -> None:
    assert f"--config-dir is {tmp_path}/nowhere, and there is no such folder" in refusal(
        HGEMM, f"--config-dir={tmp_path}/nowhere"
    )


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


def test_a_row_says_what_was_changed_of_the_timing_preset():
    """Otherwise two rows of one preset would not compare, and resume would take the one for the other."""
    for name in groups()["timing"]:
        assert name_changes(one(HGEMM, f"timing={name}").timing).name == name
    changed = one(HGEMM, "timing=quick", "timing.looks=[10]", "timing.audit=true").timing
    assert name_changes(changed).name == "quick looks=[10] audit=True"
    assert name_changes(name_changes(changed)) == name_changes(changed)
    assert name_changes(one(HGEMM, "timing.name=mine", "timing.warmup_s=1").timing).name == "mine"
