"""The cache of libraries that were built in a sandbox. It is separate from the ordinary build cache, and names a library by
the hash of its content."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minfer.build import cache, reads
from minfer.build.cache import Built
from minfer.build.errors import BuildError
from minfer.ops import Kernel


def store(kernel: Kernel, arch: str, built: Mapping[str, Any], library: bytes, read: Iterable[str] = ()) -> Built:
    """Store a library that a sandbox built, under the hash of its content, with what the sandbox says about it. `read`: the
    files that the compiler read besides the sources. Raises BuildError if that is malformed or cannot be stored."""
    try:
        whole = {name: built[name] for name in ("registers", "shared_bytes", "local_bytes")}
        numbers = {"seconds": built["seconds"], **whole}
        if not library or not all(value is None or 0 <= value < 1 << 31 for value in numbers.values()):
            raise ValueError("out of range")
        if not {type(value) for value in whole.values()} <= {int, type(None)} or isinstance(built["seconds"], bool):
            raise TypeError("not a number of a row")
        if not isinstance(read, (list, tuple)) or not all(isinstance(path, str) for path in read):
            raise TypeError("not the names of files")
    except (KeyError, TypeError, ValueError) as error:
        raise BuildError(f"malformed reply from the compiler's process: {error!r}") from error
    about = cache.sandboxed(cache.directory(kernel, arch))
    cache.make_folder(about.parent)
    path = about.with_name(f"{hashlib.sha256(library).hexdigest()}.so")
    done = Built(str(path), **numbers)
    text = json.dumps(asdict(done) | {"reads": reads.record(kernel, [path for path in read if path != reads.PROCESS])})
    for target, content in ((path, library), (about, text.encode())):
        partial = target.with_name(f"{target.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        partial.write_bytes(content)
        partial.replace(target)
    return done


def find(kernel: Kernel, arch: str) -> Built | None:
    """The library that a sandbox built from exactly these sources, flags and versions, or None if there is none, or if its
    content or another file that the compiler read has changed."""
    try:
        about = json.loads(cache.sandboxed(cache.directory(kernel, arch)).read_text())
        if not reads.are_current(kernel, about.pop("reads", None)):
            return None
        built = Built(**about)
        whole = hashlib.sha256(Path(built.library).read_bytes()).hexdigest() == Path(built.library).stem
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return built if whole else None
