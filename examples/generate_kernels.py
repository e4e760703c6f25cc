"""A generator of kernels that learns from a board's answers, without a network (docs/board.md):

    python examples/generate_kernels.py softmax --board course --budget 12            # mutate the best, guided by the archive
    python examples/generate_kernels.py softmax --board course --budget 12 --random   # as many at random, for a comparison
    python examples/generate_kernels.py softmax --board course --hook "./my_model"    # a command writes the kernels

A candidate is one of minfer's own kernels with other constants: the template's `constexpr int` numbers, such as tile sizes and
the number of parallel sums, are doubled or halved. Every candidate is submitted and judged like any other kernel. The one with
the best judged ratio is selected. The first line of each source records its constants, and the generator keeps no other memory
than the archive: a run begins with the best source that it finds there.

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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TEMPLATES = {
    "softmax": "cpu_vectors.cpp",
    "rmsnorm": "cpu_vectors.cpp",
    "hgemm": "cpu_blocked.cpp",
    "sgemm": "cpu_blocked.cpp",
}
NUMBER = re.compile(r"\b(k[A-Z]\w*) = (\d+)(?=[,;])")  # in a line that begins with constexpr int
TRIED = "// generated: "
LEAST, MOST = 1, 4096
Constants = dict[str, int]


def read_constants(template: str) -> Constants:
    """The constants of a template, with their values there."""
    lines = [line for line in template.splitlines() if line.lstrip().startswith("constexpr int")]
    return {name: int(value) for line in lines for name, value in NUMBER.findall(line)}


def write_kernel(template: str, symbol: str, renamed: str, constants: Constants) -> str:
    """The template with these constants and another name. Its first line records the constants."""
    lines = []
    for line in template.splitlines():
        if line.lstrip().startswith("constexpr int"):
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


def mutate(constants: Constants, draw: random.Random) -> Constants:
    """One constant doubled or halved."""
    name = draw.choice(sorted(constants))
    value = constants[name] * 2 if draw.random() < 0.5 else constants[name] // 2
    return constants | {name: min(MOST, max(LEAST, value))}


def sample(constants: Constants, draw: random.Random) -> Constants:
    """Every constant times a power of two from 1/4 to 4."""
    return {name: min(MOST, max(LEAST, round(value * 2.0 ** draw.randint(-2, 2)))) for name, value in constants.items()}


class Generator:
    """Proposes constants. `tried` has all that were judged, with the ratios of those that have a rank."""

    def __init__(self, start: Constants, draw: random.Random, at_random: bool) -> None:
        self.start, self.draw, self.at_random = start, draw, at_random
        self.tried: dict[str, float | None] = {}

    def note(self, constants: Constants, ratio: float | None) -> None:
        self.tried[json.dumps(constants, sort_keys=True)] = ratio

    @property
    def best(self) -> Constants:
        """The constants with the highest judged ratio; the template's if none has a ratio."""
        scored = {text: ratio for text, ratio in self.tried.items() if ratio is not None}
        return json.loads(max(scored, key=lambda text: scored[text])) if scored else self.start

    def propose(self) -> Constants | None:
        """Constants that were not tried, or None if many draws found none. The template's own come first."""
        if json.dumps(self.start, sort_keys=True) not in self.tried:
            return self.start
        for _ in range(200):
            found = sample(self.start, self.draw) if self.at_random else mutate(self.best, self.draw)
            if json.dumps(found, sort_keys=True) not in self.tried:
                return found
        return None


def minfer(*words: str) -> Any:
    """What a command of minfer prints as JSON. Raises RuntimeError with its message if it refuses."""
    done = subprocess.run([sys.executable, "-m", "minfer", *words, "--json"], capture_output=True, text=True, cwd=ROOT)
    if done.returncode not in (0, 4):  # 4: the kernel has no rank
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "minfer failed")
    return json.loads(done.stdout)


def ask_hook(command: str, task: dict[str, Any]) -> str:
    """The kernel that a command prints. Raises CalledProcessError."""
    done = subprocess.run(command, shell=True, input=json.dumps(task), capture_output=True, text=True, check=True)
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("op", choices=sorted(TEMPLATES))
    parser.add_argument("--board", default="board")
    parser.add_argument("--budget", type=int, default=8, help="submissions")
    parser.add_argument("--random", action="store_true", help="search at random, and do not read the archive")
    parser.add_argument("--hook", default="", help="a command that reads a task and prints a kernel")
    parser.add_argument("--as", dest="who", default="generator")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    board = ["--board", str(Path(given.board).absolute())]
    template_file = ROOT / "minfer" / "ops" / given.op / TEMPLATES[given.op]
    template, symbol = template_file.read_text("utf-8"), f"{given.op}_{template_file.stem}"
    who = given.who + ("-random" if given.random else "")
    generator = Generator(read_constants(template), random.Random(given.seed), given.random)
    season = next(s for s in minfer("board", "seasons", *board) if s["op"] == given.op and s["closed"] is None)
    answer: dict[str, Any] | None = None
    best = 0.0
    for number in range(given.budget):
        near = [] if given.random else minfer("archive", "near", given.op, "-n", "50", *board)
        for entry in near:
            if entry["season"] == season["name"] and (constants := remember(entry["source"])):
                generator.note(constants, entry["score"]["value"])
        constants = None
        if given.hook:
            task = {"op": given.op, "shown": season["shown"], "file": "generated.cpp", "template": template}
            source = ask_hook(given.hook, task | {"near": near[:5], "last": answer})
        elif (constants := generator.propose()) is not None:
            source = write_kernel(template, symbol, f"{given.op}_generated", constants)
        else:
            print("Every neighbour was tried.")
            break
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "generated.cpp"
            file.write_text(source, "utf-8")
            words = ["--as", who, "--name", f"try{number}", "--licence", "MIT", "--keep"]
            try:
                answer = minfer("submit", given.op, str(file), *words, *board)
            except RuntimeError as error:
                print(f"{number + 1}: {error}")
                if constants is not None:
                    generator.note(constants, None)
                continue
        ratio = answer["score"]["value"] if answer["score"] else None
        if constants is not None:
            generator.note(constants, ratio)
        best = max(best, ratio or 0.0)
        said = f"{ratio:.3f}" if ratio else answer["verdict"]
        print(
            f"{number + 1}: {said}, best {best:.3f}: {json.dumps(constants) if constants else 'from the hook'}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
