"""Pins every dependency, direct or not: resolves anew and writes the versions to `[tool.uv] constraint-dependencies`,
here and in `cuda12/`.

    uv run python tools/pin.py

The lock file is not committed, because it records where packages were downloaded from, which differs between sites.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^constraint-dependencies = \[\n.*?^\]\n", re.MULTILINE | re.DOTALL)


def pin(project: Path) -> None:
    """Renew the pins of a `pyproject.toml`. Raises CalledProcessError where nothing fits together."""
    text = BLOCK.sub("", project.read_text())
    project.write_text(text)  # resolve without the old pins
    uv = os.environ.get("UV", "uv")  # the one that runs this, by `uv run`
    export = [uv, "export", "--quiet", "--upgrade", "--all-groups", "--no-hashes", "--no-annotate", "--no-header"]
    export += ["--project", str(project.parent)]
    lines = subprocess.run(export, capture_output=True, text=True, check=True).stdout.splitlines()
    pins = "".join(f'    "{line.strip()}",\n' for line in lines if "==" in line)
    block = f"constraint-dependencies = [\n{pins}]\n"
    project.write_text(re.sub(r"(^\[tool\.uv\]\n)", lambda found: found[1] + block, text, flags=re.MULTILINE))
    print(f"pinned {pins.count(chr(10))} packages in {project.relative_to(ROOT)}")


def main() -> None:
    for folder in (ROOT, ROOT / "cuda12"):
        pin(folder / "pyproject.toml")


if __name__ == "__main__":
    main()
