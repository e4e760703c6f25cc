"""`minfer.results`: rows as one pandas DataFrame, for tables and plots of your own."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from minfer.rows import store
from minfer.rows.rules import REGIMES
from minfer.rows.select import newest as newest_of
from minfer.rows.select import with_rates

if TYPE_CHECKING:
    import pandas as pd

SPREAD = ("shape", "params")  # maps whose entries are columns of their own names
NEEDED = {  # what else must be read for a column
    "metric": ("metric",),
    "cold_rate": ("metric", "cold_tflops"),
    "steady_rate": ("metric", "steady_tflops"),
}
FLAT = [f.name for f in store.SCHEMA if f.name in SPREAD or not pa.types.is_nested(f.type)]
MAPS = [f.name for f in store.SCHEMA if pa.types.is_map(f.type) and f.name not in SPREAD]


def results(
    folder: str | Path = "results/", columns: Iterable[str] | None = None, *, newest: bool | str = False
) -> pd.DataFrame:
    """The rows of all parquet files below a folder, a line each, with flat columns.

    Every axis (`m`, `tokens`) and parameter (`layout`) of the ops is a column of its own, null in rows of ops that have
    none of that name; one that is called like a column of `minfer.rows.store` is `shape.<name>` or `params.<name>`. The
    other columns are that schema's: without `columns` all but samples, maps and other lists; else those named, in that
    order, where `shape` and `params` stand for all axes and parameters, `metrics` for `metrics.<name>` of each thing that
    profilers found, and likewise `peaks`, `functions`, `profilers`. Old rows have their metric and rates filled in.
    `newest=True` keeps, of each case on each device, the row that was finished last; `newest="cold"` or `"steady"` the last
    that has a time in this regime or failed, so that a newer run of the other regime does not hide it. Of a row whose
    `guarantee` begins with "judged" the times are in `judged_...`, and `cold_...` and `steady_...` are hints. To pivot:

        rows = minfer.results(newest="cold").query("op == 'hgemm'")
        rows.pivot_table("cold_rate", ["device", "dtype", "layout", "accumulate", "m", "n", "k"], "kernel")

    Raises FileNotFoundError where there is no such folder, and ValueError for a column that no row has or another
    regime. A file that cannot be read is skipped with a warning."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: give minfer.results the one with the parquet files")
    regime = newest if isinstance(newest, str) else None
    if regime is not None and regime not in REGIMES:
        raise ValueError(f"minfer.results takes newest=True, 'cold' or 'steady', got {newest!r}")
    wanted = FLAT if columns is None else list(columns)
    known, maps = [name for name in wanted if name in store.SCHEMA.names], {name.partition(".")[0] for name in wanted}
    read = {*known, *(name for name in MAPS if name in maps), *SPREAD}
    read |= {"case", "device", "run", "finished"} if newest else set()
    if regime:
        read |= {"status", *(f"{regime}_{name}" for name in ("us", "speedup", "speedup_low", "speedup_high"))}
    read |= {other for name in known for other in NEEDED.get(name, ())}
    table, bad = store.read(store.files(folder), [name for name in store.SCHEMA.names if name in read])
    for path, why in bad.items():
        warnings.warn(f"{path}: {why}; skipped", stacklevel=2)
    return _flat(with_rates(newest_of(table, regime) if newest else table), wanted)


def _flat(table: pa.Table, wanted: list[str]) -> pd.DataFrame:
    """The wanted columns, maps spread out. Raises ValueError."""
    entries = {name: _entries(table[name]) for name in table.column_names if name in (*SPREAD, *MAPS)}
    groups: dict[str, dict[str, pa.Array]] = {}  # by the word that stands for them, columns by their final names
    taken = set(store.SCHEMA.names)
    for name in SPREAD:
        groups[name] = {f"{name}.{key}" if key in taken else key: values for key, values in entries[name].items()}
        taken |= groups[name].keys()
    groups |= {
        name: {f"{name}.{key}": values for key, values in found.items()}
        for name, found in entries.items()
        if name not in SPREAD
    }
    single = {name: values for found in groups.values() for name, values in found.items()}
    single |= {name: table[name] for name in table.column_names if name not in groups}
    chosen: dict[str, pa.Array] = {}
    for name in wanted:
        if name in groups:
            chosen |= groups[name]
        elif name in single:
            chosen[name] = single[name]
        elif name.partition(".")[0] in MAPS:  # which no row here has
            chosen[name] = pa.nulls(len(table), pa.float64())
        else:
            raise ValueError(_unknown(name, [*store.SCHEMA.names, *single]))
    return _pandas(pa.table(chosen))


def _entries(column: pa.ChunkedArray) -> Mapping[str, pa.Array]:
    """The values of each key of a column of maps, null where a row has none, in the order in which keys appear."""
    maps = column.combine_chunks()
    offsets = maps.offsets.to_numpy()
    first, end = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    rows = np.repeat(np.arange(len(maps)), np.diff(offsets))
    keys = maps.keys.slice(first, end - first).dictionary_encode()
    values, of = maps.items.slice(first, end - first), keys.indices.to_numpy()
    found = {}
    for code, key in enumerate(keys.dictionary.to_pylist()):
        here = np.flatnonzero(of == code)
        places = np.full(len(maps), -1)
        places[rows[here]] = here
        found[key] = values.take(pa.array(places, mask=places < 0))
    return found


def _pandas(table: pa.Table) -> pd.DataFrame:
    """Whole numbers stay whole beside nulls."""
    import pandas as pd

    return table.to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)


def _unknown(name: str, valid: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, sorted(set(valid)), n=2)
    hint = f"did you mean {' or '.join(near)}?" if near else "minfer.rows.store has their names"
    return f"no row has a column {name!r}; {hint}"
