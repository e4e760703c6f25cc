"""What the two projects, for CUDA 13 and for CUDA 12, and the Dockerfile must agree on."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from tests.conftest import ROOT


def project(folder: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())


def pins(about: dict[str, Any]) -> dict[str, str]:
    return dict(pin.split(" ;")[0].split("==") for pin in about["tool"]["uv"]["constraint-dependencies"])


def test_cuda12_asks_for_what_minfer_asks_for_but_cuda():
    ours, theirs = project("."), project("cuda12")
    assert theirs["project"]["dependencies"] == ["minfer", "setuptools"]
    assert theirs["tool"]["uv"]["sources"] == {"minfer": {"path": "..", "editable": True}}
    changed = [re.split("[>=]", text)[0] for text in theirs["tool"]["uv"]["override-dependencies"]]
    assert [*changed, *theirs["tool"]["uv"]["exclude-dependencies"]] == ["torch", "cuda-toolkit"]
    ask = {re.split(r"[>\[]", text)[0] for text in ours["project"]["dependencies"]}
    assert {"torch", "cuda-toolkit"} <= ask and ask - {"cuda-toolkit"} <= pins(theirs).keys()
    assert ours["dependency-groups"] == theirs["dependency-groups"]
    assert ours["project"]["requires-python"] == theirs["project"]["requires-python"]


def test_each_project_pins_one_cuda():
    ours, theirs = pins(project(".")), pins(project("cuda12"))
    assert ours["cuda-toolkit"].startswith("13.") and not any(name.endswith("-cu12") for name in ours)
    assert "nvidia-cuda-runtime-cu12" in theirs and not any(name.endswith("-cu13") for name in theirs)


def test_the_base_image_has_the_cuda_that_torch_is_pinned_for():
    base = re.search(r"^ARG BASE_IMAGE=nvidia/cuda:(\d+)\.", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert base and base[1] == pins(project("."))["cuda-toolkit"].split(".")[0]
