"""`python -m minfer.launch +sweep=hgemm`: the command line; what it asks for is done by `minfer.run.start`."""

from __future__ import annotations

import sys

try:
    import codecs
    import contextlib
    import errno
    import io
    import os
    import select
    import signal
    import tomllib
    from collections.abc import Callable, Iterator
    from importlib.metadata import version
    from typing import Any

    import hydra
    from omegaconf import MISSING, OmegaConf

    from minfer.plan.config import CONF, INSTALLED, Config, UserError, check_values, register, written
    from minfer.plan.known import check_kernels, check_op
    from minfer.plan.mistakes import check_command_line, check_keys, explain
    from minfer.plan.sweeps import entry_of
except KeyboardInterrupt:  # these imports are half of the first second
    sys.exit(130)
except ModuleNotFoundError as error:  # started with another Python than that of the environment
    name = error.name
    sys.exit(f"minfer: this Python has no {name}: start it in the environment, `uv run python -m minfer.launch ...`")

REFUSED = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}  # a disk that is full, over its quota, or read-only


def compose() -> list[Config]:
    """The requests on the command line: one, several with Hydra's --multirun, or none with --version or --cfg. Raises
    UserError."""
    if "--version" in sys.argv[1:]:  # Hydra's flag of that name prints Hydra's
        print(f"minfer {find_version()}")
        return []
    check_command_line(sys.argv[1:])
    with _ending_at_once():
        return _compose()


@contextlib.contextmanager
def _ending_at_once() -> Iterator[None]:
    """Ctrl-C ends the process, silently, where nothing is there to clean up and an exception would not do: OmegaConf makes
    errors of its own of a KeyboardInterrupt."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # a program that calls us has its own
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _compose() -> list[Config]:
    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors to us instead of printing them
    sys.argv[1:] = [_as_hydra_reads_it(word) for word in sys.argv[1:]]
    composed: list[Any] = []
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(composed.append)()
        return [_typed(config) for config in composed]
    except (UserError, BrokenPipeError):  # of --help | head
        raise
    except Exception as error:  # Hydra's parsers also raise ValueError, TypeError and AssertionError
        raise UserError(explain(error)) from error


def find_version() -> str:
    """The version of these sources: of a clone, whether it is installed or not, or of a package."""
    if INSTALLED:
        return version("minfer")
    return str(tomllib.loads((CONF.parent / "pyproject.toml").read_text("utf-8"))["project"]["version"])


def _as_hydra_reads_it(word: str) -> str:
    """Hydra takes a new key of a mapping only with a plus, but an op from outside may have any parameter, and sbatch has many
    options. `extra` is a list, and one file may stand for a list of it. A shell command has characters that Hydra would read
    as its own."""
    if word.startswith(("params.", "params={", "cluster.flags.", "cluster.flags={")):
        return f"++{word}"
    key, _, value = word.partition("=")
    if key == "extra" and value not in ("", "null") and value[0] not in "['\"" and "," not in value:
        return "extra=['{}']".format(value.replace("'", r"\'"))  # a name may have @, %, # or = in it
    if key == "notify" and value not in ("", "null") and value[0] not in "'\"":
        return "notify='{}'".format(value.replace("'", r"\'"))
    return word


def _typed(composed: Any) -> Config:
    check_keys(composed)
    if composed.sweeps:
        _check_alone(composed)
        composed.op, composed.dtype = "", []
    if OmegaConf.select(composed, "op", throw_on_missing=False) and not composed.extra:
        check_op(composed.op)
    missing = OmegaConf.missing_keys(OmegaConf.merge(OmegaConf.structured(Config), composed))  # ~key deletes one
    if "op" in missing:
        raise UserError("no sweep was chosen: name one, such as +sweep=hgemm; --help lists them")
    if missing:
        key = min(missing)
        group = key.removesuffix(".name")  # it was deleted, or the user's file of it has no name
        line = f", and a line name: ... to the file {group}/....yaml if it has none" if group != key else ""
        raise UserError(f"{group} is not set; add {group}=...{line}")
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    check_values(config)
    check_kernels(config)
    return config


def _check_alone(composed: Any) -> None:
    """Raise UserError where a request for several sweeps also sets what each of them has of its own."""
    plain = {"op": MISSING, "dtype": MISSING, "kernel": "all", "params": {}}
    plain["shape"] = OmegaConf.to_container(written("shape", "squares"))
    found: Any = OmegaConf.to_container(composed)
    for key, value in plain.items():
        if found[key] != value:
            raise UserError(
                f"{key} cannot be set for several sweeps at once; run one of them: +sweep={entry_of(found['sweeps'][0])[0]}"
            )


def main() -> int:
    """The exit status: 0, 1 when cases got no row, 4 when a kernel failed, 130 when interrupted, 2 (and one line) for a
    mistaken request. docs/cluster.md has the table of all commands."""
    return exit_status(_launch)


def say_first(text: str) -> None:
    """On a terminal, say at once what a command is about to do, because its imports take seconds."""
    if sys.stderr.isatty():
        print(f"minfer: {text} ...", file=sys.stderr, flush=True)


def _launch() -> int:
    if any("=" in word for word in sys.argv[1:]):  # else it is --help or --version
        say_first("reading the request")
    if not (requests := compose()):
        return 0
    from minfer.run.start import run  # imports torch, which --help and a typo need not wait for

    return max(run(config) for config in requests)


def exit_status(command: Callable[[], int]) -> int:
    """Run a command and return its exit status. A UserError prints its one line and gives its own status. A full disk gives a
    line and 2. An interrupt gives 130. Output that nobody reads any longer, as behind `| head`, gives 141, as in a shell."""
    codecs.register_error("plain", _write_plainly)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # else a test's
            stream.reconfigure(errors="plain")
    try:
        status = _call(command)
        sys.stdout.flush()  # here, where a closed pipe is no traceback
        return status
    except UserError as error:
        print(f"minfer: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        if not _is_closed(sys.stdout.fileno()):  # it was another pipe, as to a process that died
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python writes at its end
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        where = f" to {error.filename}" if error.filename else ""
        print(
            f"minfer: cannot write{where}: {error.strerror}; free space there, or choose other folders with runs= and results=",
            file=sys.stderr,
        )
        return 2


def _call(command: Callable[[], int]) -> int:
    try:
        return command()
    except SystemExit as end:  # as Hydra and argparse end a --help
        if isinstance(end.code, str):
            raise
        return end.code or 0


PLAIN = {"µ": "u", "±": "+-", "–": "-", "—": "-", "×": "x", "·": "*", "‡": "++", "†": "+", "²": "2"}


def _write_plainly(error: UnicodeError) -> tuple[str, int]:
    """Replaces characters that a terminal's encoding lacks by ASCII."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(PLAIN.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


def _is_closed(file: int) -> bool:
    """Whether nobody reads from the other end of a pipe."""
    poll = select.poll()
    poll.register(file, select.POLLOUT)
    return any(events & select.POLLERR for _, events in poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
