"""The script of a job under SLURM: what a user calls things never becomes a command."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from submitit.slurm.slurm import _make_sbatch_string

from minfer.jobs.executors.slurm import Slurm
from minfer.jobs.run import CONFIG, Run
from minfer.plan.config import Cluster, Config, Container, Shape, UserError, check_words

# Take the place of commands of the node. srun tells its task what the script does not know, and calls it; apptainer
# writes down how it was called, and what it was to pass on, and runs it without a folder that it did not bind; python
# writes down how it was called.
STAND_INS = {
    "srun": 'while [ "${1#-}" != "$1" ]; do [[ $1 = --unbuffered ]] && shift || shift 2; done; '
    'SLURM_PROCID=3 SLURM_CPUS_PER_TASK=6 "$@"',
    "apptainer": """printf '%s\\0' "$@" > "$SAID/words"
echo "$APPTAINERENV_SLURM_JOB_ID $APPTAINERENV_SLURM_PROCID ${APPTAINERENV_SLURM_NTASKS-unset}" > "$SAID/passed"
echo "$APPTAINERENV_SLURM_CPUS_PER_TASK $APPTAINERENV_OMP_NUM_THREADS" >> "$SAID/passed"
[ -z "${HIDDEN-}" ] || rmdir "$HIDDEN"
while [ "$1" != sh ]; do shift; done
"$@"
""",
    "python": """printf '%s\\0' "$@" > "$SAID"/python""",
}
# What a shell, sbatch or Apptainer might take for something of theirs; of BAD, some cannot be told to sbatch at all.
ODD = [*"ab/ '\"`$(){}[];&|<>*?!#~=-%é", "touch pwned", "$(touch pwned)", "; touch pwned #", "%j", "$HOME"]
BAD = ["\\", "\n", "\ntouch pwned\n", "\t", ",", ":", "\x1b"]
# Hydra refuses ${ before anything is submitted.
NAMES = st.lists(st.sampled_from(ODD), max_size=6).map("".join).filter(lambda text: "${" not in text)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("tools")
    for name, script in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    yield folder


def named(base: Path, name: str) -> str:
    """A folder below `base` called like that, or nearly: a name has no slash."""
    return str(base / f"x{name.replace('/', '_')}")


@settings(deadline=None)
@given(
    names=st.lists(NAMES, min_size=9, max_size=9),
    bad=st.none() | st.tuples(st.integers(0, 8), st.sampled_from(BAD)),
    in_container=st.booleans(),
)
def test_whatever_a_user_calls_things_is_refused_or_stays_a_word(tools, names, bad, in_container):
    if bad:
        names[bad[0]] += bad[1]
    partition, account, gres, reservation, image, scratch, bind, results, run = names
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        flags = {"reservation": reservation}
        places = (
            named(base / "node", scratch),
            named(base / "results", results),
            base / "runs" / f"r{run.replace('/', '_')}",
        )
        cluster = Cluster("x", partition=partition, account=account, gres=gres, flags=flags, scratch=str(places[0]))
        container = Container("x", named(base / "images", image) if in_container else None, [f"{bind}:/mnt"])
        folder = places[2]
        folder.mkdir(parents=True)
        Path(places[1]).mkdir(parents=True)
        if container.image:
            Path(container.image).parent.mkdir(parents=True)
            Path(container.image).touch()
        config = Config(op="hgemm", dtype="float16", shape=Shape("tiny"), cluster=cluster, results=str(places[1]))
        OmegaConf.save(OmegaConf.structured(config), folder / CONFIG)
        try:
            check_words(cluster)
            Slurm(cluster, container).check_paths(Run(folder))
        except UserError as error:
            assert bad and "\n" not in str(error)
            return
        (folder / "sources").mkdir()
        script = script_of(cluster, container, folder)
        asked = [shlex.split(line) for line in script.splitlines() if line.startswith("#SBATCH ")]
        for key, value in (
            ("partition", partition),
            ("account", account),
            ("gres", gres),
            ("reservation", reservation),
        ):
            assert ["#SBATCH", f"--{key}={value}"] in asked
        check(script, tools, base, container, [str(folder), *map(str, places[:2])])


def script_of(cluster: Cluster, container: Container, folder: Path) -> str:
    """What submitit makes of it, as `submit` calls it."""
    executor, run = Slurm(cluster, container), Run(folder)
    python, asked = executor.python(run) or "true", executor.parameters(run)
    return _make_sbatch_string(
        f"{python} -u -m submitit.core._submit {shlex.quote(str(folder))}", folder / "jobs", map_count=2, **asked
    )


def check(script: str, tools: Path, base: Path, container: Container, places: list[str]) -> None:
    """Run the script as a node would: it does what it says and nothing else."""
    said = base / "said"
    said.mkdir()
    environment = {
        "PATH": f"{tools}{os.pathsep}/usr/bin{os.pathsep}/bin",
        "SAID": str(said),
        "HOME": str(base),
        "SLURM_JOB_ID": "1",
        "OMP_NUM_THREADS": "2",
    }
    done = subprocess.run(["bash", "-c", script], cwd=base, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(base.rglob("pwned"))
    if container.image is None:
        return
    assert (said / "passed").read_text() == "1 3 unset\n6 2\n"  # submitit takes an empty variable for a number
    assert (said / "python").read_text().split("\0") == ["-u", "-m", "submitit.core._submit", places[0], ""]
    words = (said / "words").read_text().split("\0")
    assert words[words.index("sh") - 1] == container.image
    binds = [words[at + 1] for at, word in enumerate(words) if word == "--bind"]
    assert {*places, *container.binds} <= set(binds)


def test_a_folder_that_is_not_bound_into_the_container_is_one_sentence(tools: Path, tmp_path: Path) -> None:
    folder, results, image = tmp_path / "run", tmp_path / "results", tmp_path / "minfer.sif"
    for made in (folder, results, folder / "sources"):
        made.mkdir()
    image.touch()
    cluster, container = Cluster("x"), Container("x", str(image))
    config = Config(op="hgemm", dtype="float16", shape=Shape("tiny"), cluster=cluster, results=str(results))
    OmegaConf.save(OmegaConf.structured(config), folder / CONFIG)
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "SAID": str(tmp_path), "HIDDEN": str(results)}
    script = script_of(cluster, container, folder)
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and not (tmp_path / "python").exists()
    assert done.stderr == (
        f"minfer: apptainer did not bind {results} into the container; have the site allow it (user bind control = yes in "
        "apptainer.conf), or use container=none\n"
    )


def test_a_folder_that_sbatch_could_not_be_told_of_is_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "a\ntouch pwned"
    folder.mkdir()
    config = Config(op="hgemm", dtype="float16", shape=Shape("tiny"), cluster=Cluster("x"))
    OmegaConf.save(OmegaConf.structured(config), folder / CONFIG)
    with pytest.raises(UserError, match=re.escape("touch pwned' has a colon, comma, backslash or control character")):
        Slurm(Cluster("x"), Container()).check_paths(Run(folder))
