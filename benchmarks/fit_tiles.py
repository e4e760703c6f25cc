"""Fits the model by which v18_fitted chooses its tile (minfer/cuda/gemm/fitted_choice.h) to the timings of `choice.py`, and
checks it on models that it has not seen.

    uv run python benchmarks/fit_tiles.py              # some 20 seconds, without a GPU
    uv run python benchmarks/fit_tiles.py --fp8        # the model of quant_gemm's v12_fp8_fitted (fp8_tiles.h)
    uv run python benchmarks/fit_tiles.py --constants  # fits to all timings, and prints the constants as the headers have them

The 24 models of `minfer/ops/models.csv` are dealt into three parts. The constants are fitted to the layers that no model of a
part has, and tested at the layers that only its models have. The loss is that of `choice.py`. Beside it stands the loss with
the header's constants, which were fitted to other products of all models.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable

import torch
from torch import Tensor

from benchmarks.choice import TIMES, TIMES_FP8, Product, Tile, Times, chosen, group_of, losses, timed
from minfer.build.errors import BuildError
from minfer.ops import drawn

PARTS, SEED, STEPS = 3, 0, 40
AT_ONCE = {1: 132, 2: 66, 4: 31, 8: 15}  # clusters of so many blocks that run at once on an H100 or H200
CYCLES_PER_US = 1755
# The constants that tiles have in common, as `fitted_us` of the header names them: where the fit begins.
BEGIN = {
    "start": 4.0, "memory_start": 4.34, "memory": 5.044, "arrive": 105.1, "of_step": 120.4, "of_tile": 2517.0,
    "idle_alone": 0.424, "idle_shared": 0.198, "sums_of_2": 1.671e-4, "sums_of_4": 1.905e-4, "nn": 0.984,
}  # fmt: skip
RATES = {False: 1.0, True: 1.05}  # of each tile, below each other and side by side


class Rows:
    """The timings of some products, a row for each product and tile."""

    def __init__(self, times: Times, products: Iterable[Product], tiles: dict[Tile, int]) -> None:
        self.keys = [(product, tile) for product in products for tile in times[product] if kind(tile) in tiles]
        self.us = torch.tensor([times[product][tile] for product, tile in self.keys], dtype=torch.float64)
        best = {product: min(times[product].values()) for product, _ in self.keys}
        fastest = torch.tensor([best[product] for product, _ in self.keys], dtype=torch.float64)
        self.weight = torch.where(self.us < 1.25 * fastest, 1.0, 0.3)  # slow tiles are not chosen anyway
        columns = list(zip(*((*product[:3], *tile) for product, tile in self.keys), strict=True))
        self.m, self.n, self.k, self.high, self.wide, self.sharing, self.parts, _ = (
            torch.tensor(column, dtype=torch.float64) for column in columns
        )
        groups = [group_of(tile.sharing, tile.beside) for _, tile in self.keys]
        self.across, self.down = (torch.tensor(column, dtype=torch.float64) for column in zip(*groups, strict=True))
        self.tile = torch.tensor([tiles[kind(tile)] for _, tile in self.keys])
        self.is_nn = torch.tensor([product.layout == "NN" for product, _ in self.keys])
        self.at_once = torch.tensor([AT_ONCE[tile.sharing * tile.parts] for _, tile in self.keys], dtype=torch.float64)

    def chosen(self, us: Tensor) -> dict[Product, Tile]:
        """The tiles that take the least time by the model, of those that were timed."""
        least: dict[Product, tuple[float, Tile]] = {}
        for (product, tile), expected in zip(self.keys, us.tolist(), strict=True):
            if product not in least or expected < least[product][0]:
                least[product] = expected, tile
        return {product: tile for product, (_, tile) in least.items()}


def kind(tile: Tile) -> Tile:
    """The tile without the parts of k: what has a rate of its own."""
    return tile._replace(parts=1)


def model_us(rows: Rows, common: dict[str, Tensor], rates: Tensor) -> Tensor:
    """The header's `fitted_us`. `rates` has for each kind the ratio of a step's cycles to those at the full rate of the tensor
    cores."""
    sharing, area = rows.sharing, rows.high * rows.wide
    tiles = (rows.m / (rows.high * rows.down)).ceil() * (rows.n / (rows.wide * rows.across)).ceil()
    waves, steps = (tiles / rows.at_once).ceil(), ((rows.k / 64).ceil() / rows.parts).ceil()
    idle = 1 - (tiles / rows.at_once).clamp(max=1)
    of_a = torch.where((sharing == 1) | (rows.across > 1), rows.high / 2, rows.high)
    of_b = torch.where(rows.down > 1, rows.wide / 2, rows.wide)
    products, arrive = area / 32 * rates[rows.tile], (of_a + of_b) * 128 / common["arrive"]
    of_idle = torch.where(sharing == 1, common["idle_alone"], common["idle_shared"])
    step = ((products**4 + arrive**4) ** 0.25 + common["of_step"]) * (1 - of_idle * idle)
    step = step * torch.where(rows.is_nn, common["nn"], 1.0)
    body = waves * (steps * step + common["of_tile"]) / CYCLES_PER_US
    bytes_ = 2 * (rows.m * rows.k + rows.n * rows.k + rows.m * rows.n)
    memory = bytes_ / (common["memory"] * 1e6) + common["memory_start"]
    of_sums = torch.where(rows.parts == 2, common["sums_of_2"], common["sums_of_4"]) * area - 0.4
    return common["start"] + (body**4 + memory**4) ** 0.25 + torch.where(rows.parts > 1, of_sums, 0.0)


def fit(rows: Rows, tiles: dict[Tile, int]) -> tuple[dict[str, Tensor], Tensor]:
    """The constants in common, and the rates, that make the logarithms of the times near those measured."""
    begin = [*BEGIN.values(), *(RATES[tile.beside] for tile in tiles)]
    logs = torch.tensor(begin, dtype=torch.float64).log().requires_grad_()

    def constants() -> tuple[dict[str, Tensor], Tensor]:
        values = logs.exp()
        return dict(zip(BEGIN, values[: len(BEGIN)], strict=True)), values[len(BEGIN) :]

    optimiser = torch.optim.LBFGS([logs], max_iter=STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        error = (model_us(rows, *constants()) / rows.us).log() * rows.weight
        loss = ((1 + (error / 0.05) ** 2).sqrt() - 1).mean()  # single times that were disturbed weigh little
        loss.backward()
        return loss

    optimiser.step(closure)
    with torch.no_grad():
        return constants()


def mean(of: Iterable[float]) -> float:
    return float(torch.tensor([*of], dtype=torch.float64).mean())


class Data:
    """The timings, the choice by the header's constants, and the kinds of tiles that it chooses. For fp8 the products have half
    of their k, as in the header's model."""

    def __init__(self, fp8: bool) -> None:
        self.of_k = 2 if fp8 else 1
        choose = chosen(fp8)
        times = timed(TIMES_FP8 if fp8 else TIMES)
        self.times = {product._replace(k=product.k // self.of_k): of for product, of in times.items()}
        self.choose = lambda product: choose(product._replace(k=product.k * self.of_k))
        sizes = {kind(self.choose(product))[:3] for product in self.times}
        kinds = sorted({kind(tile) for of in times.values() for tile in of if kind(tile)[:3] in sizes})
        self.tiles = {tile: number for number, tile in enumerate(kinds)}

    def layer(self, product: Product) -> tuple[int, int]:
        return product.n, product.k * self.of_k


def leave_out(part: int, data: Data) -> tuple[int, int, float, float]:
    """How many products the constants were fitted to and tested at, with a part of the models left out; and the mean losses
    there, with these constants and with the header's."""
    times, choose, tiles = data.times, data.choose, data.tiles
    models = random.Random(SEED).sample(drawn.models(), len(drawn.models()))
    mine = models[part::PARTS]
    left_out = set().union(*map(drawn.linear_layers, mine))
    others = set().union(*(drawn.linear_layers(model) for model in models if model not in mine))
    fitted_to = [product for product in times if data.layer(product) not in left_out]
    tested = {product: of for product, of in times.items() if data.layer(product) in left_out - others}
    constants, rows = fit(Rows(times, fitted_to, tiles), tiles), Rows(times, tested, tiles)
    found, header = losses(tested, rows.chosen(model_us(rows, *constants)).get), losses(tested, choose)
    same = found.keys() & header.keys()
    return len(fitted_to), len(same), mean(found[p] for p in same), mean(header[p] for p in same)


def print_constants(data: Data) -> None:
    common, rates = fit(Rows(data.times, data.times, data.tiles), data.tiles)
    print(", ".join(f".{name} = {value:.4g}" for name, value in common.items()))
    for tile in data.tiles:
        if not tile.beside:
            below, beside = (
                rates[data.tiles.get(tile._replace(beside=side), data.tiles[tile])] for side in (False, True)
            )
            print(f"F({tile.rows}, {tile.cols}, {tile.sharing}, {below:.3f}, {beside:.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--fp8", action="store_true", help="the tiles of quant_gemm's v12_fp8_fitted")
    parser.add_argument("--constants", action="store_true", help="print the constants that fit all timings")
    arguments = parser.parse_args()
    try:
        data = Data(arguments.fp8)
    except BuildError as error:
        sys.exit(f"fit_tiles.py: {error}")
    if arguments.constants:
        print_constants(data)
        return
    print("products fitted to and tested at; mean loss there in %: with these constants, with the header's")
    for part in range(PARTS):
        fitted_to, tested, found, header = leave_out(part, data)
        print(f"{fitted_to:6} {tested:6} {100 * found:8.2f} {100 * header:8.2f}")


if __name__ == "__main__":
    main()
