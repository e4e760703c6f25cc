"""Command lines that are composed in this process."""

from __future__ import annotations

import sys

import pytest
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from minfer import launch
from minfer.plan.config import Config, UserError

HGEMM = "+sweep=hgemm"


def compose(*words: str) -> list[Config]:
    """The requests that a command line composes to, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["minfer.launch", *words])
        patch.setenv("HYDRA_FULL_ERROR", "1")  # compose sets it; here it must not outlive the test
        if not {"--multirun", "-m"} & set(words):  # else Hydra composes twice, the first time to find this out
            patch.setattr(Hydra, "get_mode", lambda *_, **__: RunMode.RUN)
        GlobalHydra.instance().clear()
        return launch.compose()


def one(*words: str) -> Config:
    (config,) = compose(*words)
    return config


def refusal(*words: str) -> str:
    """The complaint about a command line."""
    with pytest.raises(UserError) as caught:
        compose(*words)
    message = str(caught.value)
    assert message and "\n" not in message
    return message
