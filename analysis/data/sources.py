"""Where rows are: what a user names on the command line of `report` and `compare`, as parquet files;
and those that the repository's own tables and plots are made from."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pyarrow.compute as pc
import yaml

from minfer.rows import store

RESULTS, RUNS = Path("results"), Path("runs")


class Unknown(Exception):
    """Nothing is called so; the message says what can be named."""


def find_files(word: str, results: Path, kept: Path, revisions: bool = False) -> list[Path]:
    """The parquet files that `word` names: a file, a folder, a run (its name, its folder under `runs`, or
    `results/<device>/<run>`) or, with `revisions`, a git revision of `results`. A run whose rows are not below `results` is
    looked for where its request wrote them. Unpacks into the folder `kept` the files of a revision, and the rows of a run
    that `tools/merge_rows.py` has moved. Raises Unknown."""
    path = Path(word)
    if path.is_file():
        return [path]
    is_run = (path / "config.yaml").is_file() or not path.is_dir()  # its folder, or its name
    runs = _list_files(results, path.name) if is_run else []
    merged = _find_merged(results) if is_run else {}
    if found := [*runs, *_unpack_run(path.name, merged.get(path.name, []), kept)]:
        return found
    own = _read_results(path) if is_run else None
    if own:
        if found := _list_files(own, path.name):
            return found
        raise Unknown(f"the run {path.name} has no rows below {own}; minfer status {word} says what became of it")
    if path.is_dir():
        if found := store.files(path):
            return found
        raise Unknown(f"{word} has no parquet files; name a results folder, a file or a run")
    if revisions and (found := _unpack_revision(word, results, kept)):
        return found
    places = (folder for folder in results.glob("*/*") if folder.is_dir() and folder.parent.name != store.APART)
    known = sorted({*merged, *(folder.name for folder in places if store.files(folder))})
    hint = f"the newest run below {results} is {known[-1]}" if known else f"there are no runs below {results}"
    revision = ", git revision" if revisions else ""
    raise Unknown(f"there is no file, folder{revision} or run {word}; {hint}")


def print_skipped(bad: Mapping[Path, str]) -> None:
    """Say on stderr what is wrong with each file that could not be read."""
    for path, reason in bad.items():
        print(f"{path}: {reason.rstrip('.')}; skipped", file=sys.stderr)


def _list_files(results: Path, run: str) -> list[Path]:
    """The parquet files of a run below `results`."""
    return [file for folder in sorted(results.glob(f"*/{run}")) for file in store.files(folder)] if run else []


def _read_results(run: Path) -> Path | None:
    """Where the request of a run says that its rows are; `run` is its folder or its name. None if that cannot be read."""
    for folder in (run, RUNS / run):
        try:
            return Path(yaml.safe_load((folder / "config.yaml").read_text("utf-8"))["results"])
        except (OSError, yaml.YAMLError, TypeError, KeyError, ValueError):
            continue
    return None


def _find_merged(results: Path) -> dict[str, list[Path]]:
    """For each run whose rows were merged, the files `<device>/<op>.parquet` that have some of them."""
    found: dict[str, list[Path]] = {}
    for file in sorted(path for path in results.glob("*/*.parquet") if path.parent.name != store.APART):
        table, _ = store.read([file], ["run"])
        for run in filter(None, pc.unique(table["run"]).to_pylist()):
            found.setdefault(run, []).append(file)
    return found


def _unpack_run(run: str, merged: list[Path], kept: Path) -> list[Path]:
    """Copy the rows of one run out of merged files into new files in `kept`."""
    found = []
    for file in merged:
        table, _ = store.read([file])
        found.append(kept / f"{run}-{file.parent.name}-{file.name}")
        store.write(table.filter(pc.equal(table["run"], run)), found[-1])
    return found


def list_tracked(results: Path) -> list[Path]:
    """The parquet files of a folder that git tracks: from these the repository's own tables and plots are made. None where
    this is no git clone, or git tracks nothing there."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z", "--", results], capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    names = {Path(name) for name in listed.stdout.split("\0") if name}
    return [file for file in store.files(results) if file in names] if names else []


def _unpack_revision(word: str, results: Path, kept: Path) -> list[Path]:
    """The committed results of a revision, unpacked; none where git knows no such revision, or it has no results."""
    if word.startswith("-"):
        return []
    folder = results.absolute()
    where = folder if folder.is_dir() else Path.cwd()
    command = ["git", "-C", str(where), "archive", "--format=tar", word, "--", "." if folder.is_dir() else str(results)]
    try:
        done = subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    target = Path(tempfile.mkdtemp(dir=kept))
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(target, filter="data")
    return store.files(target)
