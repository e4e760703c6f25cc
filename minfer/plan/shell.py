"""How a command of minfer is typed in the shell that this process was started from."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from minfer.plan.config import CONF, INSTALLED

WORKSPACE = Path("/workspace")  # of the image
MOUNTS = ("results", "runs")  # folders of it that docs/containers.md mounts


def command(*words: str) -> str:
    """The command line of `minfer WORDS`: by `uv run` from a clone, by `docker run` where the image was started so."""
    return " ".join([_minfer(), shlex.join(words)])


def relative(path: Path) -> Path:
    """A path relative to the working directory, if it is in there."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def in_docker() -> bool:
    """Whether the shell is outside of the Docker container that this process is in."""
    return _started_outside() and not os.environ.get("APPTAINER_CONTAINER")


def outlives(folder: Path) -> bool:
    """Whether a folder is still there when this process has ended: a container takes with it what is on no mount."""
    return not in_docker() or any(path.is_mount() for path in (folder, *folder.parents) if path != Path("/"))


def _started_outside() -> bool:
    """Whether the image's entry point started this process, not a shell within the container."""
    return bool(os.environ.get("MINFER_STARTED_OUTSIDE"))


def _minfer() -> str:
    gpu = Path("/dev/nvidiactl").exists()
    if in_docker():
        user = "" if os.getuid() == 1000 else ' --user "$(id -u):$(id -g)"'
        mounts = (f' -v "$PWD/{name}:{WORKSPACE / name}"' for name in MOUNTS if (WORKSPACE / name).is_mount())
        return f"docker run --rm{' --gpus all' if gpu else ''}{user}{''.join(mounts)} minfer"
    if _started_outside():
        return shlex.join(["apptainer", "run", *(["--nv"] if gpu else []), os.environ["APPTAINER_CONTAINER"]])
    if uv := os.environ.get("UV"):  # which `uv run` sets
        return shlex.join([_typed(Path(uv)), "run", *_project(), "minfer"])
    script = Path(sys.executable).with_name("minfer")
    return shlex.quote(_typed(script)) if script.exists() else f"{shlex.quote(_typed(Path(sys.executable)))} -m minfer"


def _project() -> list[str]:
    """The option by which uv finds the project of these sources, where it would not find it from here."""
    root, here = CONF.parent, Path.cwd()
    found = INSTALLED or "UV_PROJECT" in os.environ or here.is_relative_to(root)
    return [] if found else ["--project", str(root)]


def _typed(program: Path) -> str:
    """A program as it is typed from here: its name where the PATH has it, else its path."""
    if shutil.which(program.name) == str(program):
        return program.name
    return str(program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program)
