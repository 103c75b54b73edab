"""Reading back what `state()` of a learner wrote: a malformed or foreign state is a ValueError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def entries(state: object, kind: str, *names: str) -> list[Any]:
    """The named entries of a saved state of that kind; ValueError for any other object."""
    if not isinstance(state, Mapping) or state.get("kind") != kind or len(state) != len(names) + 1:
        raise ValueError(f"state must be one of kind {kind!r} with {names}, got {state!r:.200}")
    missing = [name for name in names if name not in state]
    if missing:
        raise ValueError(f"state must have {missing[0]!r}, got only {sorted(map(str, state))}")
    return [state[name] for name in names]


def saved_numbers(name: str, values: object, count: int) -> list[float]:
    """`count` finite numbers from a saved state; ValueError otherwise."""
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"{name} must be a list of {count} numbers, got {values!r:.200}")
    for value in values:
        if type(value) not in (int, float) or not abs(value) <= 1e30:
            raise ValueError(f"{name} must be finite numbers, got {value!r:.200}")
    return [float(value) for value in values]


def saved_count(name: str, value: object) -> int:
    """A whole number >= 0 from a saved state; ValueError otherwise."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} must be a whole number >= 0, got {value!r:.200}")
    return value
