"""Says that a run has ended: runs the command of `notify=`, or posts a line to its URL."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request

from minfer.run.progress import RunProgress

PATIENCE_S = 30.0  # so long a command or a server may take


def notify(target: str, progress: RunProgress) -> str | None:
    """Run a shell command with the run's name, folder and counts in its environment, or post them to a URL as JSON,
    `{"text": ...}`, which chat services show. Why that failed, in a sentence."""
    run = progress.run
    shards = ", ".join(f"{n} {state}" for state, n in progress.counts().items())
    text = f"minfer {run.name} has ended: {progress.rows} of {len(progress.cases)} rows; shards: {shards}; {run.folder}"
    try:
        if target.startswith(("http://", "https://")):
            body = json.dumps({"text": text}).encode()
            request = urllib.request.Request(target, body, {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=PATIENCE_S).close()
            return None
        about = {
            "MINFER_RUN": run.name,
            "MINFER_FOLDER": str(run.folder),
            "MINFER_CASES": str(len(progress.cases)),
            "MINFER_ROWS": str(progress.rows),
            "MINFER_SHARDS": shards,
            "MINFER_TEXT": text,
        }
        done = subprocess.run(target, shell=True, env=os.environ | about, timeout=PATIENCE_S)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return f"notify failed, and the run did not: {error}"
    return f"the command of notify ended with exit status {done.returncode}" if done.returncode else None
