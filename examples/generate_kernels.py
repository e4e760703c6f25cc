"""A generator of kernels that learns from a board's answers, without a network (docs/board.md):

    python examples/generate_kernels.py softmax --board course --budget 12            # change the best, guided by the archive
    python examples/generate_kernels.py softmax --board course --budget 12 --random   # all drawn at random
    python examples/generate_kernels.py softmax --board course --hook "./my_model"    # a command writes the kernels
    python examples/generate_kernels.py softmax silu_mul --board course --compare --write .   # both ways; write the results

A candidate is a template with other constants: its `constexpr int` numbers, such as tile sizes, the width of vectors, and how
much of a loop is unrolled. Each may be 1/4 to 4 times what the template says, in powers of two. Every candidate is submitted
and judged like any other kernel; one run judges several. The one with the best judged ratio is selected. The first line of each
source records its constants, and the generator remembers nothing but the archive: a run begins with the best source that it
finds there.

With --compare, the guided search and the random one take turns. Both begin with the same constants, drawn at random. The guided
search does not learn from the random one.

The command of --hook reads a JSON object from its standard input: `op`, `shown` (the problem that everybody may see), `file`
(the name that the source must have), `template`, `near` (the nearest submissions, with their sources where these may be read)
and `last` (the answer to its last kernel). It prints a source."""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TEMPLATES = {  # by op and kind of device; those in minfer/ are kernels of minfer's own
    ("softmax", "cpu"): "examples/templates/softmax/vectors.cpp",
    ("hgemm", "cpu"): "examples/templates/hgemm/tiles.cpp",
    ("rmsnorm", "cpu"): "minfer/ops/rmsnorm/cpu_vectors.cpp",
    ("softmax", "cuda"): "examples/templates/softmax/rows.cu",
    ("silu_mul", "cuda"): "examples/templates/silu_mul/pieces.cu",
}
NUMBER = re.compile(r"\b(k[A-Z]\w*) = (\d+)(?=[,;])")  # in a line that begins with constexpr int
TRIED = "// generated: "
MOST_CHARACTERS = 1 << 20  # of a source; a board takes files of 4 MiB
OCTAVES = 2  # how far a constant may be from the template's
GUIDED, AT_RANDOM, HOOK = "guided", "random", "hook"
Constants = dict[str, int]


def read_constants(template: str) -> Constants:
    """The constants of a template, with their values there."""
    lines = [line for line in template.splitlines() if line.startswith("constexpr int")]
    return {name: int(value) for line in lines for name, value in NUMBER.findall(line)}


def write_kernel(template: str, symbol: str, renamed: str, constants: Constants) -> str:
    """The template with these constants and another name. Its first line records the constants."""
    lines = []
    for line in template.splitlines():
        if line.startswith("constexpr int"):
            line = NUMBER.sub(lambda found: f"{found[1]} = {constants.get(found[1], int(found[2]))}", line)
        lines.append(re.sub(rf"\b{symbol}\b", renamed, line))
    return "\n".join([TRIED + json.dumps(constants, sort_keys=True), *lines, ""])


def remember(source: str | None) -> Constants | None:
    """The constants that a source of this program records; None for any other source."""
    first = (source or "").partition("\n")[0]
    if not first.startswith(TRIED):
        return None
    try:
        return {str(name): int(value) for name, value in json.loads(first.removeprefix(TRIED)).items()}
    except (ValueError, AttributeError):
        return None


class Generator:
    """Proposes constants. `tried` has all that were judged, with the ratios of those that have a rank.

    template: the template's own constants, around which others are drawn. start: the first that are proposed."""

    def __init__(
        self, template: Constants, draw: random.Random, at_random: bool, start: Constants | None = None
    ) -> None:
        self.template, self.draw, self.at_random = template, draw, at_random
        self.start = start or template
        self.tried: dict[str, float | None] = {}

    def note(self, constants: Constants, ratio: float | None) -> None:
        self.tried[json.dumps(constants, sort_keys=True)] = ratio

    @property
    def best(self) -> Constants:
        """The constants with the highest judged ratio; the first ones if none has a ratio."""
        scored = {text: ratio for text, ratio in self.tried.items() if ratio is not None}
        return json.loads(max(scored, key=lambda text: scored[text])) if scored else self.start

    def sample(self) -> Constants:
        """Every constant drawn at random."""
        return {
            name: self._fit(name, value * 2.0 ** self.draw.randint(-OCTAVES, OCTAVES))
            for name, value in self.template.items()
        }

    def mutate(self, constants: Constants) -> Constants:
        """One or two constants doubled, halved, or changed by a factor of four."""
        found = dict(constants)
        for name in self.draw.sample(sorted(found), min(len(found), self.draw.choice((1, 1, 2)))):
            found[name] = self._fit(name, found[name] * 2.0 ** self.draw.choice((-2, -1, -1, 1, 1, 2)))
        return found

    def propose(self) -> Constants | None:
        """Constants that were not tried, or None if many draws found none. The first ones are `start`."""
        if json.dumps(self.start, sort_keys=True) not in self.tried:
            return self.start
        for _ in range(200):
            known = any(ratio is not None for ratio in self.tried.values())  # otherwise the best is only the first one
            found = self.mutate(self.best) if known and not self.at_random else self.sample()
            if json.dumps(found, sort_keys=True) not in self.tried:
                return found
        return None

    def _fit(self, name: str, value: float) -> int:
        middle = self.template[name]
        return max(1, round(min(middle * 2.0**OCTAVES, max(middle * 2.0**-OCTAVES, value))))


def minfer(*words: str) -> Any:
    """What a command of minfer prints as JSON. Raises RuntimeError with its message if it refuses."""
    done = subprocess.run([sys.executable, "-m", "minfer", *words, "--json"], capture_output=True, text=True, cwd=ROOT)
    if done.returncode not in (0, 4):  # 4: the kernel has no rank
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "minfer failed")
    return json.loads(done.stdout)


def ask_hook(command: str, task: dict[str, Any]) -> str:
    """The kernel that a command prints. Raises RuntimeError if the command fails or prints nothing."""
    done = subprocess.run(
        command, shell=True, input=json.dumps(task), capture_output=True, encoding="utf-8", errors="replace"
    )
    if done.returncode or not done.stdout.strip():
        said = done.stderr.strip().splitlines()[-1:] or ["nothing on its standard error"]
        raise RuntimeError(
            f"the command {command!r} ended with status {done.returncode} and {'a' if done.stdout.strip() else 'no'} source"
            f" ({said[0]}); it must print a source and end with status 0"
        )
    if len(done.stdout) > MOST_CHARACTERS:
        raise RuntimeError(
            f"the command {command!r} printed {len(done.stdout):,} characters; a source may have {MOST_CHARACTERS:,}"
        )
    return done.stdout


@dataclass
class Search:
    """One way to find kernels of an op: guided, at random, or by a hook. `rows` has a row for each submission."""

    season: dict[str, Any]
    way: str
    who: str
    board: list[str]
    generator: Generator
    hook: str = ""
    last: dict[str, Any] | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def op(self) -> str:
        return str(self.season["op"])

    @property
    def file(self) -> Path:
        return ROOT / TEMPLATES[self.op, self.season["device"]]

    @property
    def best(self) -> float:
        return max((row["ratio"] or 0.0 for row in self.rows), default=0.0)

    def step(self, count: int) -> bool:
        """Submit `count` kernels at once and print their ratios, or why they were not judged. False if there is none to
        submit."""
        try:
            if kernels := self._write(count):
                self._judge(kernels)
            else:
                print(f"{self.op}, {self.way}: every neighbour was tried.")
        except RuntimeError as error:
            self._tell(error)
            return True
        return bool(kernels)

    def _tell(self, error: RuntimeError | str) -> None:
        print(f"{self.op}, {self.way}: {error}", file=sys.stderr, flush=True)

    def _write(self, count: int) -> list[tuple[str, str, Constants | None]]:
        """The name, source and constants of `count` kernels, or of as many as there are. Raises RuntimeError."""
        near = []
        if self.way != AT_RANDOM:
            near = minfer("archive", "near", self.op, "-n", "50", *self.board)["submissions"]
        near = [entry for entry in near if not entry["who"].endswith(f"-{AT_RANDOM}")]
        for entry in near:
            if entry["season"] == self.season["name"] and (constants := remember(entry["source"])):
                self.generator.note(constants, entry["score"]["value"])
        template, symbol = self.file.read_text("utf-8"), f"{self.op}_{self.file.stem}"
        kernels: list[tuple[str, str, Constants | None]] = []
        for number in range(len(self.rows), len(self.rows) + count):
            # A board refuses a source that it has, and both ways of --compare begin with the same constants.
            name = f"{'random' if self.way == AT_RANDOM else 'try'}{number}"
            if self.hook:
                task = {"op": self.op, "shown": self.season["shown"], "file": f"{name}{self.file.suffix}"}
                task |= {"template": template, "near": near[:5], "last": self.last}
                try:
                    kernels.append((name, ask_hook(self.hook, task), None))
                except RuntimeError as error:
                    if not kernels:
                        raise
                    self._tell(error)  # the kernels that it printed before are judged
                    break
            elif constants := self.generator.propose():
                self.generator.note(constants, None)
                kernels.append((name, write_kernel(template, symbol, f"{self.op}_{name}", constants), constants))
        return kernels

    def _judge(self, kernels: list[tuple[str, str, Constants | None]]) -> None:
        """Have kernels judged in one run. One that the board refuses costs no other its run: its answer says why. Raises
        RuntimeError for what is no kernel's fault, such as a season that has ended, or if all are refused."""
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / f"{name}{self.file.suffix}" for name, _, _ in kernels]
            for file, (_, source, _) in zip(files, kernels, strict=True):
                file.write_text(source, "utf-8")
            words = ["--each", "--as", self.who, "--licence", "MIT", "--keep", "--device", self.season["device"]]
            answers = minfer("submit", self.op, *map(str, files), *words, *self.board)
        self.last = answers[-1]
        for (_, _, constants), answer in zip(kernels, answers, strict=True):
            if not answer["submission"]:
                self._tell(answer["message"])
                continue
            score = answer["score"] or {}
            ratio, text = score.get("value"), json.dumps(constants, sort_keys=True) if constants else "from the hook"
            if constants is not None:
                self.generator.note(constants, ratio)
            row = {"op": self.op, "way": self.way, "number": 1 + len(self.rows), "constants": text}
            row |= {"verdict": answer["verdict"], "ratio": ratio, "low": score.get("low"), "high": score.get("high")}
            self.rows.append(row | {"submission": answer["submission"], "device": answer["device"]})
            said = f"{ratio:.3f}" if ratio else answer["verdict"]
            print(f"{self.op}, {self.way} {len(self.rows)}: {said}, best {self.best:.3f}: {text}", flush=True)


def make_search(season: dict[str, Any], way: str, given: argparse.Namespace, from_afar: bool) -> Search:
    """A search of a season's op; `from_afar`: it begins with constants drawn at random."""
    template = read_constants((ROOT / TEMPLATES[season["op"], season["device"]]).read_text("utf-8"))
    generator = Generator(template, random.Random(given.seed), at_random=way == AT_RANDOM)
    if from_afar:
        generator.start = generator.sample()
    who = given.who + (f"-{AT_RANDOM}" if way == AT_RANDOM else "")
    return Search(season, way, who, ["--board", str(Path(given.board).absolute())], generator, given.hook)


def find_device() -> str:
    """The kind of device that this machine has."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def choose_season(seasons: list[dict[str, Any]], op: str, given: argparse.Namespace) -> dict[str, Any]:
    """The open season of an op; if there are two, the one on the kind of device that this machine has. Raises RuntimeError."""
    open_ones = {season["device"]: season for season in seasons if season["op"] == op and season["closed"] is None}
    fits = [device for name, device in TEMPLATES if name == op and given.device in ("", device)]
    if not fits:
        raise RuntimeError(f"there is no template of {op} on {given.device}; choose another --device or op")
    found = [device for device in fits if device in open_ones]
    if len(found) != 1 and (here := find_device()) in fits:
        fits, found = [here], [device for device in found if device == here]
    if not found:
        there = f"; its open season is on {' and on '.join(open_ones)}" if open_ones else ""
        raise RuntimeError(
            f"{given.board} has no open season of {op} on {' or '.join(fits)}{there}; open one with"
            f" minfer board open-season {op} --device {fits[0]} --board {given.board}"
        )
    return open_ones[found[0]]


def write_rows(searches: list[Search], root: Path) -> None:
    """Write what was found so far to benchmarks/results/."""
    sys.path.insert(0, str(ROOT))
    import torch

    from benchmarks.rows import write

    rows = [row for search in searches for row in search.rows]
    device = torch.device("cuda" if any(search.season["device"] == "cuda" for search in searches) else "cpu")
    if rows:
        write("generate", rows, device, root)


def positive(text: str) -> int:
    """A number of kernels, from 1. Raises ValueError, which argparse tells in a sentence."""
    if (value := int(text)) < 1:
        raise ValueError(text)
    return value


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("op", nargs="+", choices=sorted({op for op, _ in TEMPLATES}))
    parser.add_argument("--board", default="board")
    parser.add_argument("--budget", type=positive, default=8, help="submissions of a search")
    parser.add_argument("--at-once", type=positive, default=4, metavar="N", help="submissions that one run judges")
    parser.add_argument("--random", action="store_true", help="search at random, and do not read the archive")
    parser.add_argument("--compare", action="store_true", help="search both ways, in turns, from the same place")
    parser.add_argument("--hook", default="", help="a command that reads a task and prints a kernel")
    parser.add_argument("--as", dest="who", default="generator")
    about = "if the op has a season on both (default: cuda if this machine has a GPU)"
    parser.add_argument("--device", choices=("cpu", "cuda"), default="", help=about)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, metavar="DIR", help="write a row for each submission below DIR")
    given = parser.parse_args()
    try:
        seasons = minfer("board", "seasons", "--board", str(Path(given.board).absolute()))["seasons"]
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    ways = (GUIDED, AT_RANDOM) if given.compare else (HOOK,) if given.hook else (AT_RANDOM if given.random else GUIDED,)
    searches = []
    for op in given.op:
        try:
            season = choose_season(seasons, op, given)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 2
        searches += [make_search(season, way, given, given.compare) for way in ways]
    for begin in range(0, given.budget, given.at_once):
        for search in searches:
            if search.step(min(given.at_once, given.budget - begin)) and given.write:
                write_rows(searches, given.write)
    return 0 if any(search.rows for search in searches) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
