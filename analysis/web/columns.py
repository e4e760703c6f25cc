"""Tables of a page, as a browser reads them fast: columns in one block of bytes, compressed.

A block is the length of its header (4 bytes, little-endian), the header (JSON), and the columns' bytes, each at a multiple of
8 after the header's end, which is padded to one. A column of numbers is float64, with NaN for null; in a table that is
`compact` float32, where it keeps seven digits of all values. A column of texts is an index into its distinct texts, in
natural order, so that sorting a column of numbers and one of texts is the same.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minfer.rows.problems import natural

Texts = Sequence[str | None]
Numbers = np.ndarray  # float64, NaN for null


def encode(columns: Mapping[str, Texts | Numbers], compact: bool = False) -> dict[str, Any]:
    """The columns in the form that `pack` takes: a description of each, and the bytes of all under `bytes`."""
    about: dict[str, Any] = {}
    parts: list[bytes] = []
    offset = 0
    for name, values in columns.items():
        described, data = _numbers(values, compact) if isinstance(values, np.ndarray) else _texts(values)
        about[name] = described | {"offset": offset}
        data += bytes(-len(data) % 8)
        parts.append(data)
        offset += len(data)
    length = max((len(values) for values in columns.values()), default=0)
    return {"length": length, "columns": about, "bytes": b"".join(parts)}


def _numbers(values: np.ndarray, compact: bool) -> tuple[dict[str, Any], bytes]:
    finite = values[np.isfinite(values)]
    whole = bool(np.all(finite == np.round(finite)))  # a count or a time stamp is exact or wrong
    narrow = np.all(np.abs(finite) < 2**24) if whole else np.all(np.abs(finite) < 1e38)
    kind = "f4" if compact and narrow else "f8"
    return {"type": kind}, np.where(np.isfinite(values), values, math.nan).astype(f"<{kind}").tobytes()


def _texts(values: Texts) -> tuple[dict[str, Any], bytes]:
    distinct = sorted({value or "" for value in values}, key=natural)
    places = {text: index for index, text in enumerate(distinct)}
    kind = "u1" if len(distinct) <= 1 << 8 else "u2" if len(distinct) <= 1 << 16 else "u4"
    codes = np.fromiter((places[value or ""] for value in values), dtype=f"<{kind}", count=len(values))
    return {"type": kind, "texts": distinct}, codes.tobytes()


def pack(tables: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """Tables (`encode`) and other facts (JSON) as base64 text."""
    header: dict[str, Any] = {"tables": {}, "facts": facts}
    data = b""
    for name, table in tables.items():
        header["tables"][name] = {"length": table["length"], "columns": table["columns"], "offset": len(data)}
        data += table["bytes"]
    text = json.dumps(header, allow_nan=False).encode()
    text += b" " * (-(4 + len(text)) % 8)
    return compress(len(text).to_bytes(4, "little") + text + data)


def compress(data: bytes) -> str:
    """Bytes as base64 of gzip, which browsers read by themselves (`DecompressionStream`)."""
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()
