"""The backend of torch.compile: fuses what minfer has a faster kernel for, and hands the rest to inductor, or runs it eagerly.

Fusing happens in the place that inductor has for it, `post_grad_custom_pre_pass`: the graph is functional there, and autograd
has already split it, so that what the backward needs is an output of the forward graph.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule

from minfer.functional import best
from minfer.fusion import picture, worth
from minfer.fusion.rewrite import Policy, apply
from minfer.fusion.rules import RULES

PLACE = "post_grad_custom_pre_pass"
SOURCES = tuple(map(str, [*sorted(Path(__file__).parent.glob("*.py")), best.__file__, worth.TABLE, best.TABLE]))
NAMES = tuple(rule.name for rule in RULES)


@dataclass(frozen=True)
class Options:
    """What `options=` of torch.compile, and keywords of `minfer.fuse`, may have; all are checked when it is made.

    rest: what runs all that is not fused: "inductor", or "eager", which starts at once and needs no compiler but minfer's.
    patterns: names of NAMES, the patterns to look for; all unless given.
    unmeasured: "refuse" leaves what was not measured on this device as it is; "fuse" replaces that too.
    svg: a folder for a picture of each graph before and after."""

    rest: str = "inductor"
    patterns: Collection[str] = NAMES
    unmeasured: str = "refuse"
    svg: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("rest", tuple(worth.AGAINST)), ("unmeasured", ("refuse", "fuse"))):
            if (given := getattr(self, name)) not in allowed:
                raise ValueError(f"minfer.fuse takes {name}={' or '.join(map(repr, allowed))}, got {given!r}")
        several = isinstance(self.patterns, Collection) and not isinstance(self.patterns, str)
        if not several or not all(name in NAMES for name in self.patterns):
            raise ValueError(f"minfer.fuse takes patterns of {', '.join(NAMES)}, got {self.patterns!r}")
        if self.svg is not None and (not isinstance(self.svg, str | os.PathLike) or not os.fspath(self.svg)):
            raise ValueError(f"minfer.fuse takes svg as the path of a folder, got {self.svg!r}")

    @property
    def policy(self) -> Policy:
        return Policy(self.rest, self.unmeasured)


OURS = tuple(field.name for field in fields(Options))


class Fusion(CustomGraphPass):
    """The pass over one graph."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def __call__(self, graph: Graph) -> None:
        drawn = picture.drawing(graph) if self.options.svg is not None else None
        rules = [rule for rule in RULES if rule.name in self.options.patterns]
        outcomes = apply(graph, rules, self.options.policy)
        if explained():
            lines = [f"minfer.fuse: {outcome.sentence()}\n" for outcome in outcomes]
            sys.stderr.write("".join(lines) or "minfer.fuse: nothing in this graph has the form of a pattern\n")
        if drawn is not None and self.options.svg is not None:
            try:
                picture.write(Path(self.options.svg), drawn, picture.drawing(graph), outcomes)
            except OSError as error:  # which is no reason for the model not to run
                sys.stderr.write(f"minfer.fuse: cannot write a picture to {self.options.svg}: {error.strerror}\n")

    def uuid(self) -> Any:
        """Inductor's caches have it as a part of their key. None, for no cache: one that is hit would say and draw nothing."""
        if explained() or self.options.svg is not None:
            return None
        return get_hash_for_files(SOURCES, repr(self.options))


def explained() -> bool:
    return os.environ.get("MINFER_EXPLAIN") == "1"


def minfer(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """`torch.compile(model, backend="minfer", mode=..., options=...)`: options are those of `Options`, and inductor's."""
    given = dict(options or {})
    ours = Options(**{name: given.pop(name) for name in OURS if name in given})
    if ours.rest == "eager":
        if given or mode:
            unused = ", ".join(map(repr, given)) or f"mode={mode!r}"
            raise ValueError(
                f"minfer's backend hands options to inductor, and rest='eager' leaves it out: drop {unused}"
            )
        return _eagerly(Fusion(ours), gm, example_inputs)
    known = torch._inductor.config.get_config_copy()
    for name in given:
        if name.replace("-", "_") not in known:
            raise ValueError(
                f"minfer's backend has no option {name!r}: it takes {', '.join(OURS)}, and those of inductor"
            )
    if known[PLACE] is not None or PLACE in given:
        raise ValueError(f"minfer's backend is inductor's {PLACE}, which is taken: leave it unset")
    patches = torch._inductor.list_mode_options(mode) if mode else {}
    patches |= {name.replace("-", "_"): value for name, value in given.items()}
    compiled: Any = compile_fx(gm, example_inputs, config_patches={**patches, PLACE: Fusion(ours)})
    return compiled


def _eagerly(fuse: Fusion, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """With inductor's decompositions, so that a pattern has one form, and nothing of inductor's."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition  # type: ignore[import-untyped]

    def compiler(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        fuse(graph.graph)
        graph.recompile()
        return make_boxed_func(graph.forward)

    return aot_autograd(
        fw_compiler=compiler,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )(gm, example_inputs)
