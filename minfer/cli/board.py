"""`minfer submit`, `minfer archive` and `minfer board`: kernels that others wrote, their answers and their ranks."""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import NoReturn

from minfer import launch
from minfer.board import archive, near
from minfer.board.folder import DEFAULT, Board
from minfer.board.season import close_season, list_seasons, open_season
from minfer.board.stage import read_files
from minfer.plan.config import UserError, choose
from minfer.plan.known import DTYPES, check_op

SUBMIT, ARCHIVE, BOARD = "submit", "archive", "board"
FAILED = 4  # the exit status of a submission that has no rank, as of a launch whose kernel failed


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def submit(words: list[str]) -> int:
    """Have a kernel judged; the exit status is 0 where it has a rank. Raises UserError."""
    parser = _Parser(
        prog="minfer submit", description="Have a kernel judged on a board's hidden problems (docs/board.md)."
    )
    parser.add_argument("op", metavar="OP", help="such as softmax; the board must have an open season of it")
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="the source (.cu, .cpp, .py), then its headers"
    )
    parser.add_argument("--name", default="", help="what the kernel is called (default: the file's name)")
    parser.add_argument("--as", dest="who", default="", metavar="WHO", help="whose it is (default: your login name)")
    parser.add_argument("--licence", default="", metavar="L", help="the licence of the source, such as MIT")
    parser.add_argument(
        "--keep", action="store_true", help="the archive may keep the source and show it; needs --licence"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="", help="where the op has a season on both")
    parser.add_argument(
        "--each",
        action="store_true",
        help="each file is a submission of its own, with the file's name; one run judges all",
    )
    _add_common(parser, as_json=True)
    given = parser.parse_args(words)
    if given.keep and not given.licence:
        raise UserError("--keep lets others read the source; say under which licence, such as --licence MIT")
    board = Board.find(given.board)
    if not any(season.extra and season.op == given.op for season in list_seasons(board)):
        check_op(given.op)
    files = read_files(given.files)
    launch.say_first(f"judging {given.files[0].name}; a small op takes a minute")
    from minfer.board import answer as answers
    from minfer.board.submit import submit as judge  # imports torch, which a typo need not wait for
    from minfer.board.submit import submit_each

    who = given.who or getpass.getuser()
    with contextlib.nullcontext() if given.json else board.steps:
        if given.each:
            sources = [{name: content} for name, content in files.items()]
            found = submit_each(board, given.op, sources, who, given.device, given.licence, given.keep)
        else:
            found = [judge(board, given.op, files, who, given.name, given.device, given.licence, given.keep)]
    if given.json:
        print(json.dumps(found if given.each else found[0], indent=1))
    else:
        print("\n\n".join(map(answers.text, found)))
    return 0 if any(answer["verdict"] == "ranked" for answer in found) else FAILED


def read_archive(words: list[str]) -> int:
    """One of the archive's commands; the exit status is 0. Raises UserError."""
    parser = _Parser(prog="minfer archive", description="Look at the submissions of a board (docs/board.md).")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    shown = {
        "list": "all submissions, the newest last",
        "show": "one submission: its answer and its source",
        "diff": "two submissions: their sources and the numbers that differ most",
        "near": "the submissions that are most similar to a task, the most similar one first",
        "remove": "remove one of your own",
        "quarantine": "set one aside with its files and its log; it has no rank then (the board's owner)",
        "export": "everything that may be kept, in one .tar.gz file",
    }
    parsers = {name: commands.add_parser(name, help=about, description=about) for name, about in shown.items()}
    for name, each in parsers.items():
        _add_common(each, as_json=name in ("list", "show", "diff", "near"))
    parsers["list"].add_argument("--op", default="", help="of one op")
    parsers["list"].add_argument("--as", dest="who", default="", metavar="WHO", help="of one person")
    for name in ("show", "remove", "quarantine"):
        parsers[name].add_argument("id", metavar="ID", help="a submission, or the first digits of it")
    parsers["diff"].add_argument("a", metavar="A")
    parsers["diff"].add_argument("b", metavar="B")
    parsers["near"].add_argument("op", metavar="OP")
    parsers["near"].add_argument("--dtype", default="", help="such as float16")
    parsers["near"].add_argument("--shape", default="", metavar="AXIS=SIZE,...", help="such as rows=64,n=4096")
    parsers["near"].add_argument("--like", default="", metavar="ID", help="a submission whose instructions to compare")
    parsers["near"].add_argument("-n", type=int, default=5, dest="count", help="so many (default: 5)")
    parsers["remove"].add_argument(
        "--as", dest="who", default="", metavar="WHO", help="whose it is (default: your login name)"
    )
    parsers["quarantine"].add_argument("--why", default="", help="a sentence for the record")
    parsers["export"].add_argument("file", type=Path, metavar="FILE")
    given = parser.parse_args(words)
    board = Board.find(given.board)
    match given.command:
        case "list":
            archive.print_list(board, given.op, given.who, given.json)
        case "show":
            archive.print_entry(board, board.entry(given.id), given.json)
        case "diff":
            archive.print_difference(board, board.entry(given.a), board.entry(given.b), given.json)
        case "near":
            if given.count < 1:
                raise UserError(f"-n {given.count} shows no submission; write 1 or more")
            like = board.entry(given.like) if given.like else None
            if given.dtype:
                choose("dtype", given.dtype, DTYPES)
            try:
                check_op(given.op)
            except UserError:  # an op of the board need not be minfer's own
                if given.op not in {s.op for s in list_seasons(board)} | {entry.op for entry in board.entries()}:
                    raise
            task = near.Task.of(given.op, given.dtype, _sizes(given.shape), like)
            archive.print_near(board, task, given.count, given.json)
        case "remove":
            archive.remove(board, board.entry(given.id), given.who or getpass.getuser())
        case "quarantine":
            archive.quarantine(board, board.entry(given.id), given.why)
        case "export":
            archive.export(board, given.file)
    return 0


def manage(words: list[str]) -> int:
    """One of the board's commands; the exit status is 0. Raises UserError."""
    parser = _Parser(
        prog="minfer board", description="Open and close seasons, and write a board's pages (docs/board.md)."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    shown = {
        "open-season": "draw new hidden problems of an op",
        "close-season": "end the season of an op, and show its shapes",
        "import-task": "write the file that makes an op of a task of KernelBench, flashinfer-bench or GPU MODE",
        "import-solution": "make a submission of a solution of flashinfer-bench",
        "export-task": "write an op of minfer's as a definition of flashinfer-bench, with workloads",
        "seasons": "list the seasons",
        "rank": "the standings of all seasons",
        "build": "write the pages, board.json and the Atom feed",
        "prove": "time the kernel with the best score in the same rounds as the record's holder, if nobody has done so",
        "watch": "judge the files that people put into inbox/OP/",
    }
    parsers = {name: commands.add_parser(name, help=about, description=about) for name, about in shown.items()}
    for name, each in parsers.items():
        _add_common(each, as_json=name in ("seasons", "rank"))
    for name in ("open-season", "close-season", "prove"):
        parsers[name].add_argument("op", metavar="OP")
        other = "cuda where there is a GPU" if name == "open-season" else "that of the op's open season"
        parsers[name].add_argument("--device", choices=("cpu", "cuda"), default="", help=f"default: {other}")
    parsers["open-season"].add_argument("--extra", type=Path, help="the file that brings the op, if it is not minfer's")
    parsers["import-task"].add_argument(
        "file",
        type=Path,
        metavar="TASK",
        help="a .py file, a .json file, or a folder with task.yml; you trust its code",
    )
    parsers["import-task"].add_argument("--workloads", type=Path, metavar="FILE", help="of a definition (.jsonl)")
    parsers["import-task"].add_argument(
        "--check", action="store_true", help="only say which tasks in a folder can be imported"
    )
    parsers["import-task"].add_argument("--name", default="", help="what the op is called (default: the file's name)")
    parsers["import-task"].add_argument(
        "-o", "--output", type=Path, default=Path("tasks"), help="a folder (default: tasks)"
    )
    parsers["import-solution"].add_argument("file", type=Path, metavar="FILE", help="the solution (.json)")
    parsers["import-solution"].add_argument(
        "--definition", type=Path, required=True, metavar="FILE", help="what it solves"
    )
    parsers["import-solution"].add_argument("--name", default="", help="the op (default: the definition's file)")
    parsers["import-solution"].add_argument(
        "-o", "--output", type=Path, default=Path("solution.py"), help="the submission"
    )
    parsers["export-task"].add_argument("op", metavar="OP")
    parsers["export-task"].add_argument("--dtype", default="float16", help="default: float16")
    parsers["export-task"].add_argument("--shape", default="", metavar="AXIS=SIZE,...", help="such as hidden=4096")
    parsers["export-task"].add_argument(
        "-o", "--output", type=Path, default=Path("trace"), help="a folder (default: trace)"
    )
    parsers["build"].add_argument("folder", type=Path, nargs="?", metavar="DIR", help="the board (default: --board)")
    parsers["build"].add_argument("-o", "--output", type=Path, default=Path("site"), help="default: site")
    parsers["build"].add_argument("--url", default="", help="where the pages will be, for the feed's links")
    parsers["watch"].add_argument("--once", action="store_true", help="judge what is there, and end")
    given = parser.parse_args(words)
    if given.command == "open-season":
        return _open(given)
    if given.command == "import-task":
        return _import_task(given)
    if given.command == "import-solution":
        return _import_solution(given)
    if given.command == "export-task":
        return _export_task(given)
    board = Board.find(getattr(given, "folder", None) or given.board)
    match given.command:
        case "close-season":
            launch.say_first("drawing the season's problems once more, to show them")
            _load_extra(board, given.op)
            season = close_season(board, given.op, given.device)
            print(f"{season.name} is closed; its {len(season.shapes)} shapes are in {board.folder / 'seasons'}.")
        case "seasons":
            archive.print_seasons(board, given.json)
        case "rank":
            archive.print_ranks(board, given.json)
        case "build":
            from minfer.board import page

            print(f"{page.build(board, given.output, given.url)}: open it in a browser.")
        case "prove":
            launch.say_first("looking for a kernel whose score is higher than that of the record's holder")
            from minfer.board.submit import prove

            with board.steps:
                said = prove(board, given.op, given.device)
            print(said)
        case "watch":
            from minfer.board.watch import watch

            watch(board, given.once)
    return 0


def _open(given: argparse.Namespace) -> int:
    if given.extra is None:
        check_op(given.op)
    elif not given.extra.is_file():
        raise UserError(f"--extra={given.extra} does not exist")
    launch.say_first("drawing the season's problems")
    import torch

    from minfer import ops
    from minfer.plan import extra

    path = str(given.extra.absolute()) if given.extra else ""
    if path:
        extra.load(path)
    if given.op not in ops.names() or ops.get(given.op).drawn is None:
        having = [name for name in ops.names() if ops.get(name).drawn]
        raise UserError(f"{given.op} does not say how its problems are drawn; choose {' or '.join(having)}")
    board = Board.make(given.board)
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    season = open_season(board, given.op, device, path)
    shape = ", ".join(f"{axis}={size}" for axis, size in season.shown["shape"].items())
    print(
        f"{season.name} is open in {board.folder}, with {season.problems} hidden problem{'s' * (season.problems != 1)}."
        " Everybody may see problem 0:"
    )
    print(f"  {season.shown['dtype']}, {shape}{''.join(f', {k}={v}' for k, v in season.shown['params'].items())}")
    print(f"Next: minfer submit {given.op} FILE --board {given.board}")
    return 0


def _import_task(given: argparse.Namespace) -> int:
    if not given.file.exists():
        raise UserError(f"{given.file} does not exist; name a task, or with --check a folder")
    launch.say_first("checking the tasks" if given.check else "running the task")
    from minfer.board import importing

    if given.check:
        found = importing.check_folder(given.file)
        print(importing.describe_folder(given.file, found))
        return 0 if importing.count(found)[importing.IMPORTS] else FAILED
    name = given.name or given.file.stem
    path, notes = importing.write_extra(given.file, name, given.output, given.workloads)
    for note in notes:
        print(f"Note: {note}.")
    print(f"{path} makes {given.file.name} the op {name}.")
    print(f"Next: minfer board open-season {name} --extra {path} --board {given.board}")
    return 0


def _import_solution(given: argparse.Namespace) -> int:
    from minfer.board.flashinfer import read_definition, read_json
    from minfer.board.flashinfer_form import convert_solution

    name = given.name or given.definition.stem
    definition = read_definition(read_json(given.definition), given.definition.name)
    given.output.write_text(convert_solution(read_json(given.file), definition, name), "utf-8")
    print(f"{given.output} is {given.file.name} as a submission.")
    print(f"Next: minfer submit {name} {given.output} --board {given.board}")
    return 0


def _export_task(given: argparse.Namespace) -> int:
    check_op(given.op)
    from minfer.board.flashinfer_form import write_definition

    definition, workloads = write_definition(given.op, given.dtype, _sizes(given.shape), given.output)
    print(f"{definition} and {workloads} are {given.op} in the form of flashinfer-bench.")
    return 0


def _load_extra(board: Board, op: str) -> None:
    """Import the file that registers an op, if its season has one."""
    from minfer.plan import extra

    for path in {season.extra for season in list_seasons(board) if season.op == op and season.extra}:
        extra.load(path)


def _add_common(parser: argparse.ArgumentParser, as_json: bool) -> None:
    default = Path(os.environ.get("MINFER_BOARD", DEFAULT))
    about = f"the board's folder (default: $MINFER_BOARD, else {DEFAULT})"
    parser.add_argument("--board", type=Path, default=default, metavar="DIR", help=about)
    if as_json:
        parser.add_argument("--json", action="store_true", help="print JSON")


def _sizes(text: str) -> dict[str, int]:
    """The sizes of `rows=64,n=4096`. Raises UserError."""
    found = {}
    for word in filter(None, text.split(",")):
        if not (pair := re.fullmatch(r"(\w+)=(\d+)", word)):
            raise UserError(f"cannot read {word!r} of --shape; write axis=size, such as rows=64,n=4096")
        found[pair[1]] = int(pair[2])
    return found


COMMANDS = {SUBMIT: submit, ARCHIVE: read_archive, BOARD: manage}


def main(command: str, words: list[str]) -> int:
    """The exit status of one of COMMANDS; 2 (and one line) for a mistake. SIGTERM ends it as Ctrl-C does: otherwise a
    submission would be pending for ever, and its run's folder would stay."""
    sys.argv[1:] = []  # so that nothing that composes a configuration reads these words
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return launch.exit_status(lambda: COMMANDS[command](words))
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough, and cleaning up is not to be interrupted
    raise KeyboardInterrupt
