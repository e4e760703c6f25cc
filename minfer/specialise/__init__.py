"""Kernels that adapt to the sizes that a process sees: counted, compiled in the background, tried, and then called.

`docs/specialise.md` says how; `recipes` has the ops of this project that do it.
"""

from minfer.specialise.buckets import Span, exact, powers_of_two, ranges
from minfer.specialise.policy import Policy
from minfer.specialise.recipe import Recipe
from minfer.specialise.specialiser import Specialiser
from minfer.specialise.trial import Outcome

__all__ = ["Outcome", "Policy", "Recipe", "Span", "Specialiser", "exact", "powers_of_two", "ranges"]
