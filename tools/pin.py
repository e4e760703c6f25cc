"""Pins every dependency, direct or not: resolves anew and writes the versions to `[tool.uv] constraint-dependencies`.

    uv run python tools/pin.py

The lock file is not committed, because it records where packages were downloaded from, which differs between sites.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
BLOCK = re.compile(r"^constraint-dependencies = \[\n.*?^\]\n", re.MULTILINE | re.DOTALL)


def main() -> None:
    text = BLOCK.sub("", PYPROJECT.read_text())
    PYPROJECT.write_text(text)  # resolve without the old pins
    export = ["uv", "export", "--quiet", "--upgrade", "--all-groups", "--no-hashes", "--no-annotate", "--no-header"]
    lines = subprocess.run(export, capture_output=True, text=True, check=True, cwd=PYPROJECT.parent).stdout.splitlines()
    pins = "".join(f'    "{line.strip()}",\n' for line in lines if "==" in line)
    block = f"constraint-dependencies = [\n{pins}]\n"
    PYPROJECT.write_text(re.sub(r"(^\[tool\.uv\]\n)", lambda found: found[1] + block, text, flags=re.MULTILINE))
    print(f"pinned {pins.count(chr(10))} packages in {PYPROJECT.name}")


if __name__ == "__main__":
    main()
