"""What the plots of some rows show."""

from __future__ import annotations

from matplotlib.axes import Axes

from minfer.analysis import make_plots
from minfer.analysis.plots import Picture
from minfer.analysis.rows import usable
from minfer.analysis.style import encoded
from minfer.rows import store


def drawn(*made: store.Row) -> dict[str, Picture | str]:
    """What is made of rows of one op on one device: pictures or sentences, by name."""
    return {name: picture for *_, name, picture in make_plots.pictures(usable(store.to_table(made)))}


def panels(name: str, *made: store.Row) -> list[Axes]:
    """The axes of one picture, laid out."""
    picture = drawn(*made)[name]
    assert isinstance(picture, Picture), picture
    encoded(picture.figure, picture.about)
    return picture.figure.axes


def points(ax: Axes, label: str) -> list[tuple[float, float]]:
    """The points of the one line with that label, as drawn."""
    (line,) = [line for line in ax.lines if line.get_label() == label]
    return [(float(x), float(y)) for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]


def texts(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]
