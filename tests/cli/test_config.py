"""The command line as a user meets it: what composes, and to what."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from minfer.cli import ACTIONS
from minfer.plan.config import CONF, Config, Shape, groups, name_changes, written
from minfer.plan.known import check_kernels, check_op
from minfer.plan.sweeps import SWEPT, parts
from minfer.shapes import OPS, named_sets
from tests.cli.composing import HGEMM, compose, one, refusal
from tests.tiers import mostly_slow


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
    "extra=it's@my%1 #a=b$.py": ("extra", ["it's@my%1 #a=b$.py"]),
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
    compositions = []
    real = ConfigLoaderImpl.load_sweep_config
    monkeypatch.setattr(
        ConfigLoaderImpl, "load_sweep_config", lambda *args, **more: compositions.append(1) or real(*args, **more)
    )
    configs = compose("--multirun", HGEMM, "dtype=float16,bfloat16")
    assert [config.dtype for config in configs] == ["float16", "bfloat16"]
    assert len(compositions) == 2  # Hydra alone composes each twice
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


OTHERS = sorted(path for path in CONF.glob("*/*.yaml") if path.parent.name not in ("shape", "sweep"))


def options_together(path: Path) -> tuple[str, ...]:
    """An option, and beside it one of each other group: composing takes a quarter of a second."""
    number = sorted(path.parent.glob("*.yaml")).index(path)
    beside = {
        other.parent.name: other.stem for other in OTHERS if sorted(other.parent.glob("*.yaml")).index(other) == number
    }
    return tuple(f"{group}={option}" for group, option in beside.items())


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_every_option_of_every_other_group_composes_and_bears_its_files_name(path: Path) -> None:
    group, option = path.parent.name, path.stem
    assert option in groups()[group] and f"{group}={option}" in options_together(path)
    config = composed(options_together(path))
    assert config.op and config.dtype
    assert getattr(getattr(config, group), "name", option) == option


SWEEPS = sorted(CONF.glob("sweep/*.yaml"))


def is_plain(path: Path) -> bool:
    """Whether a sweep has its own keys only, and of other groups only the set of shapes."""
    sweep = written("sweep", path.stem)
    others = [each for each in sweep.get("defaults", []) if {*each} != {"override /shape"}]
    return {*sweep} <= {*SWEPT, "defaults", "cluster"} and not others


@pytest.mark.parametrize("path", [path for path in SWEEPS if is_plain(path)], ids=lambda path: f"sweep={path.stem}")
def test_every_plain_sweep_is_what_its_types_say(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of several, which are read without composing: that takes ten times as long."""
    assert path.stem in groups()["sweep"] and path.read_text().startswith("# @package _global_\n")
    monkeypatch.setattr(sys, "argv", ["minfer"])
    (config,) = parts(Config(sweeps=[path.stem]))
    check_op(config.op)
    check_kernels(config)
    assert config.op and config.dtype and config.shape.op in ("", config.op)


@pytest.mark.parametrize(
    "path",
    mostly_slow(SWEEPS, lambda path: not is_plain(path) or path.stem == "hgemm"),
    ids=lambda path: f"sweep={path.stem}",
)
def test_every_sweep_composes(path: Path) -> None:
    assert path.stem in groups()["sweep"]
    config = one(f"+sweep={path.stem}")
    assert config.sweeps or (config.op and config.dtype)


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
        ([], ["no sweep was chosen", "--help"]),
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


def test_a_row_says_what_was_changed_of_the_timing_preset():
    """Otherwise two rows of one preset would not compare, and resume would take the one for the other."""
    for name in groups()["timing"]:
        assert name_changes(one(HGEMM, f"timing={name}").timing).name == name
    changed = one(HGEMM, "timing=quick", "timing.looks=[10]", "timing.audit=true").timing
    assert name_changes(changed).name == "quick looks=[10] audit=True"
    assert name_changes(name_changes(changed)) == name_changes(changed)
    assert name_changes(one(HGEMM, "timing.name=mine", "timing.warmup_s=1").timing).name == "mine"
