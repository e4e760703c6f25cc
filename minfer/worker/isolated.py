"""The process that runs one kernel for the judge, on tensors in memory that it shares with the judge. It gets no seed and no
reference."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from minfer import build, ops
from minfer.bench import device as devices
from minfer.bench.arena import attach, view
from minfer.bench.verify import synchronize
from minfer.build import cache
from minfer.ops import Case, Returning
from minfer.process.remote import serve
from minfer.worker.links import Link

# Calls in one CUDA graph. If a kernel works on a stream of its own, and the caller's stream waits for it, a graph takes long to
# instantiate: on an H100 0.13 s for 256 calls, 8.9 s for 1024.
GRAPH_CALLS = 256


class Runner:
    """Runs one kernel on tensors in the shared memory. Each public method answers the request of its name."""

    def __init__(
        self, device: str, case: dict[str, Any], arena: dict[str, Any], extra: list[str], libraries: dict[str, str]
    ) -> None:
        self.device = devices.pick(device)
        self.memory = attach(arena)
        cache.use_libraries(libraries)
        for path in extra:
            ops.load_file(Path(path))
        op = ops.get(case["op"])
        self.op, self.case = op, Case(**case)
        self.kernel = op.kernels[case["kernel"]]
        self.function = build.function(self.kernel, devices.arch(self.device))
        self.blocks: dict[bool, Callable[[int], object]] = {}  # without links and with them
        self.returned: object = None  # by the last call; while it is kept, the next call gets other memory

    def hello(self) -> dict[str, Any]:
        return {"ready": True}

    def call(self, tensors: list[dict[str, Any]], arguments: dict[str, Any]) -> dict[str, Any]:
        """One call."""
        returned = self.function(*(view(self.memory, tensor) for tensor in tensors), **arguments)
        synchronize(self.device)
        return {"returned": None if returned is None else type(returned).__name__}

    def prepare(
        self, sets: list[list[dict[str, Any]]], arguments: dict[str, Any], linked: bool = False
    ) -> dict[str, Any]:
        """Prepare a block: one call on each of these sets of operands. On a GPU, capture the block in CUDA graphs. In a block
        that is `linked`, an input of each call depends on the result of the call before (`minfer.worker.links`).

        A baseline that returns new tensors does not copy them to its outputs. `Bench` does not time that copy either."""
        operands = [tuple(view(self.memory, tensor) for tensor in tensors) for tensors in sets]
        function = self.function.compute if isinstance(self.function, Returning) else self.function
        links = self._link(operands) if linked else [nothing] * len(operands)

        def call_on(some: slice) -> None:
            for tensors, link in zip(operands[some], links[some], strict=True):
                self.returned = function(*tensors, **arguments)
                link()

        call_on(slice(None))
        synchronize(self.device)
        self.blocks[linked] = lambda calls: call_on(slice(calls))
        if self.device.type == "cuda":
            graphs, pool = [], torch.cuda.graph_pool_handle()
            for first in range(0, len(operands), GRAPH_CALLS):
                graphs.append(torch.cuda.CUDAGraph())
                with torch.cuda.graph(graphs[-1], pool=pool):
                    call_on(slice(first, first + GRAPH_CALLS))

            def replay(calls: int) -> None:
                for graph in graphs:
                    graph.replay()

            replay(len(operands))  # the first replay takes longer
            synchronize(self.device)  # links that went on would change the values of the next block
            self.blocks[linked] = replay
        return {"done": True}

    def _link(self, operands: list[tuple[torch.Tensor, ...]]) -> list[Callable[[], object]]:
        """What to do after each call, so that the next one depends on it. After the last call there is nothing to do."""
        how = Link.between(self.op, self.case)
        assert how
        names = [spec.name for spec in self.op.specs(self.case)]
        named = [dict(zip(names, tensors, strict=True)) for tensors in operands]
        return [*(how.prepare(later, earlier) for earlier, later in itertools.pairwise(named)), nothing]

    def run(self, calls: int, linked: bool = False) -> dict[str, Any]:
        """Run one block: a call on each of the first `calls` sets; on a GPU, on all prepared ones. The reply is its seconds
        by the clock of this process."""
        begin = time.perf_counter()
        self.blocks[linked](calls)
        synchronize(self.device)
        return {"done": time.perf_counter() - begin}

    def rest(self) -> dict[str, Any]:
        """Answer an empty request, which costs as much as a block without its calls."""
        synchronize(self.device)
        return {"done": 0.0}


def nothing() -> None:
    """What follows a call that no other one depends on."""


def main() -> None:
    gc.freeze()  # torch.cuda.graph runs the garbage collector each time, which need not look at the modules loaded by now
    runner: Runner | None = None

    def answer(request: dict[str, Any], _: object) -> dict[str, Any]:
        nonlocal runner
        what = request.pop("what")
        try:
            if runner is None:
                runner = Runner(**request)
                return runner.hello()
            return getattr(runner, what)(**request)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}

    serve(answer)


if __name__ == "__main__":
    main()
