"""Rows: what one case left behind, in one schema, in parquet files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

APART = "apart"  # in a results folder: rows that show how they were made, and take no place among the others

# What became of a case. A case has times only with the first two.
STATUSES = {
    "ok": "correct, and timed to the precision asked for, or to what the clock resolves",
    "unconverged": "correct, and timed, but less precisely than asked for, or a judged time does not fit those inside",
    "wrong": "the result differs from the reference by more than rounding, so it has no time",
    "dishonest": "the kernel broke a rule of measuring, such as doing less when it is timed, so it has no time",
    "impossible": "faster than the device's measured peaks allow, so that the time cannot be true",
    "unsupported": "the kernel states that it does not support this case",
    "compile_error": "the kernel does not compile",
    "error": "the kernel raised an error",
    "crashed": "the process died",
    "timeout": "the process was killed at the deadline",
    "oom": "memory ran out, on the GPU or on the host",
}
MEASURED = ("ok", "unconverged")
FAILED = tuple(status for status in STATUSES if status not in (*MEASURED, "unsupported"))
HOST_BOUND = (  # in `flags`; `cold_late` and `cold_baseline_late` say how often
    "a call keeps the host longer than the GPU can be kept waiting, or waits for the GPU: cold times contain that"
)
BUSY = (
    "threads waited for a processor (cold_waited), probably because other programs ran, so times may be much too long"
)
SLOW = "a call takes long, so its shape was verified on one set of inputs, and timed in few rounds and no steady calls"
TOLD = (  # columns of a row that a launcher shows before it reads the row's file
    "guarantee", "baseline", "metric", "cold_us", "cold_rate", "cold_speedup", "cold_speedup_low", "cold_speedup_high",
    "cold_verdict", "judged_us", "judged_rate", "judged_speedup", "judged_speedup_low", "judged_speedup_high", "judged_verdict",
)  # fmt: skip
AMENDABLE = ("metrics", "functions", "profilers")  # maps, that grow after a row was written

PARQUET: dict[str, Any] = {"compression": "zstd", "write_page_checksum": True}

_NUMBER, _COUNT, _TEXT = pa.float64(), pa.int64(), pa.string()


def _regime(name: str, how: str, time: str, ratio: str, interval: str) -> list[tuple[str, pa.DataType, str]]:
    """The columns of one timing regime."""
    return [
        (f"{name}_us", _NUMBER, f"time of one call, {how}, in microseconds: {time}"),
        (f"{name}_p10_us", _NUMBER, "10th percentile of the samples"),
        (f"{name}_p90_us", _NUMBER, "90th percentile of the samples"),
        (f"{name}_baseline_us", _NUMBER, "the baseline's time, measured beside it"),
        (f"{name}_speedup", _NUMBER, f"baseline's time over this kernel's: {ratio}"),
        (f"{name}_speedup_low", _NUMBER, f"lower end of {interval}"),
        (f"{name}_speedup_high", _NUMBER, f"upper end of {interval}"),
        (
            f"{name}_aa_spread",
            _NUMBER,
            "how far the baseline seems to be from its own duplicate: a gain must exceed it",
        ),
        (f"{name}_verdict", _TEXT, "faster, tie or slower than the baseline"),
        (f"{name}_tflops", _NUMBER, "the op's FLOPs over the time, in 10^12 a second"),
        (f"{name}_gbps", _NUMBER, "the op's least bytes over the time, in 10^9 a second"),
        (f"{name}_rate", _NUMBER, "throughput, in the unit that `metric` names"),
        (
            f"{name}_percent_of_peak",
            _NUMBER,
            "the least time that the measured peaks allow for these FLOPs and bytes, over the time, in percent; GPU only",
        ),
        (f"{name}_samples_us", pa.list_(_NUMBER), "every sample of this kernel, in the order taken"),
        (f"{name}_baseline_samples_us", pa.list_(_NUMBER), "every sample of the baseline, in the same order"),
        (
            f"{name}_duplicate_samples_us",
            pa.list_(_NUMBER),
            "every sample of the baseline's duplicate, in the same order",
        ),
    ]


COLUMNS: list[tuple[str, pa.DataType, str]] = [
    # identity
    ("run", _TEXT, "the launch that made this row"),
    (
        "finished",
        pa.timestamp("us", tz="UTC"),
        "when the case was finished, by the clock of the file system of the run's folder",
    ),
    ("case", _TEXT, "the case's key: op/kernel/dtype/parameters/shape"),
    ("op", _TEXT, "the problem"),
    ("kernel", _TEXT, "the implementation"),
    ("backend", _TEXT, "torch, cuda, triton or cpp"),
    ("dtype", _TEXT, "element type of inputs and output"),
    ("params", pa.map_(_TEXT, _TEXT), "the op's own parameters, such as layout and accumulate"),
    ("shape", pa.map_(_TEXT, _COUNT), "the op's axes and their sizes"),
    ("operands", _TEXT, "the tensors: q inout bfloat16 (2048, 32, 128); positions in int32 (2048)"),
    ("source", _TEXT, "hash of the kernel's, its op's and the bench's sources"),
    ("timing", _TEXT, "name of the timing preset, and what was changed of it"),
    ("status", _TEXT, ", ".join(STATUSES)),
    ("message", _TEXT, "why the status is not ok, in a sentence"),
    # correctness
    ("drawn", _COUNT, "seed with which the problem was drawn; null where somebody chose it"),
    ("chosen", _TEXT, "the kernel that a function chose for the problem, and why; null for other kernels"),
    ("seed", _COUNT, "seed of the random inputs; for odd shapes, results with an earlier row's seed may count"),
    ("rel_l2_error", _NUMBER, "largest ||out - reference|| / ||reference|| over the verified inputs"),
    ("max_abs_error", _NUMBER, "largest |out - reference|"),
    ("error_over_bound", _NUMBER, "largest |out - reference| / bound over the elements; above 1 is wrong"),
    (
        "error_over_limit",
        _NUMBER,
        "largest ||out - reference|| / the limit for the whole output; above 1 is wrong; null in older rows",
    ),
    ("verified", _COUNT, "how many sets of inputs the kernel was verified on"),
    # time
    ("metric", _TEXT, "the unit of the op's throughput, such as TFLOP/s, GB/s or tokens/s; null means TFLOP/s"),
    ("baseline", _TEXT, "the kernel that speedups are against"),
    *_regime(
        "cold",
        "one at a time, caches flushed before it",
        "the median of the rounds",
        "the median of the rounds' ratios",
        "the 95 % confidence interval of the median ratio",
    ),
    ("cold_rounds", _COUNT, "rounds of kernel, baseline and baseline's duplicate, in shuffled order"),
    ("cold_empty_us", _NUMBER, "what the same window reads with no kernel in it; not subtracted"),
    ("cold_launch_us", _NUMBER, "what the same window reads with an empty kernel in it; null on a CPU"),
    (
        "cold_late",
        _NUMBER,
        "share of the kernel's cold windows whose begin the GPU reached before the host had issued the whole call, so that "
        "they may contain the host's time; null on a CPU",
    ),
    ("cold_baseline_late", _NUMBER, "the same share of the baseline's cold windows"),
    (
        "cold_waited",
        _NUMBER,
        "seconds for which all threads together were ready and had no processor, over the seconds of the cold rounds; it can "
        "exceed 1; null on a GPU",
    ),
    *_regime(
        "steady",
        "back to back in long blocks, inputs rotated",
        "a block's mean on a GPU and its median on a CPU, and of the kernel's two blocks the geometric mean",
        "steady_baseline_us over steady_us",
        "the range over neighbouring blocks",
    ),
    ("steady_rotations", _COUNT, "sets of inputs that the calls of a block go round"),
    (
        "steady_blocks",
        pa.list_(_COUNT),
        "samples of each block in the order taken: kernel, baseline, duplicate, kernel; only a block's second half counts",
    ),
    # energy, of the steady regime; null where NVML does not count it
    ("steady_joules", _NUMBER, "joules of one call"),
    ("steady_baseline_joules", _NUMBER, "joules of one call of the baseline, measured beside it"),
    ("energy_gain", _NUMBER, "baseline's joules over this kernel's"),
    ("energy_gain_low", _NUMBER, "lower end of its range over neighbouring blocks"),
    ("energy_gain_high", _NUMBER, "upper end of its range over neighbouring blocks"),
    ("energy_aa_spread", _NUMBER, "how far the baseline's joules seem to be from its own duplicate's"),
    ("energy_verdict", _TEXT, "thriftier, tie or costlier than the baseline"),
    # what the device can do, and what a call has to do
    (
        "peaks",
        pa.map_(_TEXT, _NUMBER),
        "what this device did at best in this run, by minfer.bench.peaks: GB/s, TFLOP/s, MHz",
    ),
    (
        "roof",
        _TEXT,
        "the peak that bounds the case: wgmma_bfloat16_float32, fma_float32 (CUDA cores), copy_gbps, read_gbps, ...",
    ),
    ("floor_us", _NUMBER, "no cold call can take less, by those peaks; null on a CPU"),
    ("flops", _NUMBER, "floating-point operations of one call"),
    ("bytes", _NUMBER, "the fewest bytes of one call: each input read once, each output written once"),
    # cost
    ("build_s", _NUMBER, "seconds to compile; 0 where there is nothing to compile, null when found in the cache"),
    (
        "tune_s",
        _NUMBER,
        "seconds that Triton's autotuner timed configurations, for all shapes verified; null where it timed none",
    ),
    ("verify_s", _NUMBER, "seconds to verify"),
    ("time_s", _NUMBER, "seconds to time, warm-up included"),
    ("registers", _COUNT, "registers a thread, the most over the file's functions"),
    ("shared_bytes", _COUNT, "static shared memory a block, the most over the file's functions"),
    ("local_bytes", _COUNT, "stack and spills a thread, the most over the file's functions"),
    (
        "workspace_bytes",
        _COUNT,
        "the most device memory that a call takes beyond its operands, by PyTorch's allocator; null on a CPU",
    ),
    ("launches", _COUNT, "kernels that one call launches; null on a CPU"),
    (
        "metrics",
        pa.map_(_TEXT, _NUMBER),
        "what the profilers found, such as static.sm_89.registers; what a judge found of another kernel: beside.speedup",
    ),
    ("functions", pa.map_(_TEXT, _TEXT), "the device functions that these are of, such as that of static.sm_89"),
    ("profilers", pa.map_(_TEXT, _TEXT), "the profilers that were run: ok, or why one found nothing, or not all"),
    # the machine's state while the kernel ran steadily
    ("sm_mhz", _NUMBER, "SM clock"),
    ("memory_mhz", _NUMBER, "memory clock"),
    ("power_w", _NUMBER, "board power"),
    ("temperature_c", _NUMBER, "GPU temperature"),
    ("throttle", _TEXT, "reasons for a lowered clock, joined by +; empty when there are none"),
    (
        "watch_s",
        pa.list_(_NUMBER),
        "when the following were sampled while the case was timed, in seconds; ten a second",
    ),
    ("watch_sm_mhz", pa.list_(_NUMBER), "SM clock at those times"),
    ("watch_memory_mhz", pa.list_(_NUMBER), "memory clock at those times"),
    ("watch_power_w", pa.list_(_NUMBER), "board power at those times"),
    ("watch_temperature_c", pa.list_(_NUMBER), "GPU temperature at those times"),
    ("watch_throttle", _TEXT, "every reason for a lowered clock that was seen while the case was timed"),
    # a second clock, with timing.audit
    ("audit_us", _NUMBER, "median time of the kernels of one cold call, as CUPTI's activity records give it"),
    ("audit_events_us", _NUMBER, "median time of the same calls by CUDA events, less what an empty window reads"),
    ("audit_kernels", pa.list_(_TEXT), "the kernels that one call launches"),
    # a process outside, with untrusted=true
    (
        "guarantee",
        _TEXT,
        "what stands behind a time: in-process, the kernel shared a process with the clock and could have tampered with "
        "it; judged, a process that the kernel has no part in found it right and timed it (the judged_ columns), and then "
        "what kept the kernel from that process: namespaces, landlock or limits (docs/security.md)",
    ),
    *_regime(
        "judged",
        "by the clock of a process outside, in blocks of calls on fresh inputs",
        "the median of the blocks",
        "the median of the rounds' ratios",
        "the range of the four rounds' ratios, an 87.5 % confidence interval of their median",
    ),
    (
        "libraries",
        pa.list_(_TEXT),
        "names of the shared objects that the kernel's process had loaded when it was timed, without those that every such "
        "process has before it loads foreign code, and without what minfer built; in a judged row, of the process that the "
        "judge timed; in other rows, of a process that had also called the baseline; null in older rows",
    ),
    ("flags", _TEXT, "what to know before trusting the row, in sentences; empty when there is nothing"),
    # environment
    ("device", _TEXT, "the GPU's or, for CPU kernels, the processor's name"),
    ("device_kind", _TEXT, "cuda or cpu"),
    ("arch", _TEXT, "sm_89, sm_90a, ...; the machine type for a CPU"),
    ("l2_bytes", _COUNT, "last-level cache of the device"),
    ("threads", _COUNT, "threads that CPU kernels used"),
    ("driver", _TEXT, "NVIDIA driver version"),
    ("cuda", _TEXT, "CUDA version of torch"),
    ("torch", _TEXT, "PyTorch version"),
    ("triton", _TEXT, "Triton version"),
    ("python", _TEXT, "Python version"),
    ("node", _TEXT, "host name; in a job SLURM's name of the node"),
    ("job", _TEXT, "SLURM job, when there was one"),
    ("image", _TEXT, "digest (else the name) of the base of the container image, when there was one"),
    ("commit", _TEXT, "commit of the sources, with + when the tree had changes"),
]
SCHEMA = pa.schema([pa.field(name, kind, metadata={"doc": doc}) for name, kind, doc in COLUMNS])

Row = dict[str, Any]


def to_table(rows: Iterable[Row]) -> pa.Table:
    """Rows as a table of the schema; an unknown column is an error, a missing one is null."""
    rows = list(rows)
    unknown = {name for row in rows for name in row} - set(SCHEMA.names)
    if unknown:
        raise KeyError(f"no such column: {', '.join(sorted(unknown))}")
    arrays = [pa.array([to_arrow(row.get(field.name)) for row in rows], type=field.type) for field in SCHEMA]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def to_arrow(value: Any) -> Any:
    """A value as Arrow takes it: a map as a list of pairs."""
    return list(value.items()) if isinstance(value, Mapping) else value


def slug(device: str) -> str:
    """A device's name as a folder name: `NVIDIA H200` -> `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "unknown"


def write(table: pa.Table, path: Path) -> None:
    """Write a parquet file so that it is there whole or not at all, also after a power cut. Raises OSError."""
    with write_whole(path) as file:
        pq.write_table(table, file, **PARQUET)


@contextlib.contextmanager
def write_whole(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes its place when it is whole, and leaves nothing behind when it never is."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def files(results: Path) -> list[Path]:
    """The parquet files under a results folder, in a stable order; not those in its folder `apart`."""
    found = (path for path in results.rglob("*.parquet") if not path.name.startswith("."))
    return sorted(path for path in found if path.relative_to(results).parts[0] != APART)


def read(paths: Iterable[Path], columns: Iterable[str] | None = None) -> tuple[pa.Table, dict[Path, str]]:
    """The rows of parquet files, and what is wrong with each file that could not be read.

    Columns that an older file lacks are null."""
    schema = pa.schema([SCHEMA.field(name) for name in columns]) if columns is not None else SCHEMA
    bad: dict[Path, str] = {}
    tables = [schema.empty_table()]
    for path in paths:
        try:
            tables.append(read_one(path, schema))
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            bad[path] = (str(error).splitlines() or [type(error).__name__])[0]
    return pa.concat_tables(tables), bad


def read_one(path: Path, schema: pa.Schema) -> pa.Table:
    """The rows of one parquet file, null where it lacks a column. Raises OSError, ArrowException, ValueError and KeyError."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        names = set(file.schema_arrow.names)  # pyarrow rebuilds schema_arrow at every use
        if "case" not in names:
            raise ValueError("not a minfer results file: it has no column 'case'")
        table = file.read(columns=[name for name in schema.names if name in names])
    arrays = [table.column(f.name).cast(f.type) if f.name in names else pa.nulls(len(table), f.type) for f in schema]
    table = pa.Table.from_arrays(arrays, schema=schema)
    table.validate(full=True)
    return table


def rows(paths: Iterable[Path], columns: Iterable[str] | None = None) -> Iterator[Row]:
    """The readable rows as dictionaries, maps as dictionaries too; for results of ordinary size."""
    table, _ = read(paths, columns)
    yield from table.to_pylist(maps_as_pydicts="strict")
