"""What profilers that run kernels share: a case ready to be called in their process, and what they say of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from minfer import build, ops
from minfer.bench import device as devices
from minfer.bench.verify import Inputs, synchronize
from minfer.ops import Case
from minfer.profilers import Finding, Job
from minfer.rows import store

MOST_KERNELS = 4  # device functions that get metrics of their own; the totals have all of them


def prepare_call(case: Case, device: str) -> Callable[[], None]:
    """One call of a case on `device`, "cuda" or "cpu", with the scalars that are timed; on a GPU it does not wait.

    It has run once, so that what is compiled, loaded or tuned at the first call is in no profile. The operands are the
    same at every call, so a cache that is large enough keeps them. Raises what building and calling a kernel may raise.
    """
    op, place = ops.get(case.op), devices.pick(device)
    function = build.function(op.kernels[case.kernel], devices.arch(place))
    operands = Inputs(case, "normal", seed=0).operands(op, place)

    def call() -> None:
        function(*operands.arguments, **op.call(case))

    call()
    synchronize(place)
    return call


def attempt(find: Callable[..., Finding], *about: object) -> Finding:
    """What `find(*about)` finds; an error costs this case alone. Raises RuntimeError where the CUDA context is lost with
    it: the cases after it need another process."""
    try:
        return find(*about)
    except Exception as error:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # raises
        return Finding(why=sentence(error))


def sentence(error: BaseException) -> str:
    """The first line of an error, with its type where it is not ours."""
    text = (str(error).strip().splitlines() or [""])[0]
    return text if isinstance(error, RuntimeError) and text else f"{type(error).__name__}: {text}"


def artefact(job: Job, case: Case, suffix: str) -> Path:
    """Where a file of a case is kept, `<case>.suffix`, in a folder that exists. Raises OSError."""
    job.folder.mkdir(parents=True, exist_ok=True)
    return job.folder / f"{store.slug(case.key)}{suffix}"


def per_call(kernels: Mapping[str, tuple[float, float]], calls: int) -> Finding:
    """What `calls` calls ran on the device, by call, from the launches and microseconds of each device function.

    `kernels` is how many were launched and `device_us` their time; of the longest ones `kernel0.device_us`,
    `kernel0.calls` and so on, with their names in `functions`."""
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:MOST_KERNELS]
    metrics = {
        "kernels": sum(count for count, _ in kernels.values()) / calls,
        "device_us": sum(us for _, us in kernels.values()) / calls,
    }
    for index, (_, (count, us)) in enumerate(longest):
        metrics |= {f"kernel{index}.device_us": us / calls, f"kernel{index}.calls": count / calls}
    return Finding(metrics, {f"kernel{index}": name for index, (name, _) in enumerate(longest)})
