"""The reference of every configuration key, as Markdown, from the pydantic models themselves."""

from __future__ import annotations

from dataclasses import fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from policies.methods import METHODS, Method
from serve_app.config import GraphArgs

_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def configuration() -> str:
    """docs/configuration.md: a table of keys for each group of GraphArgs, and the methods."""
    lines = [
        "# Configuration",
        "",
        "Every key of `serve run serve_app:graph key=value…`, and of `args` in a Serve YAML file. "
        "Written by `outrider config`.",
    ]
    for group, field in GraphArgs.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        lines += ["", f"## {group}", ""]
        if vars(model).get("__doc__"):
            lines += [" ".join(str(model.__doc__).split()), ""]
        lines += ["| key | type | default | |", "|---|---|---|---|"]
        for name, key in model.model_fields.items():
            cells = (f"`{group}.{name}`", _type(key), f"`{_value(key.default)}`")
            lines.append(f"| {' | '.join(cells)} | {key.description or ''} |")
    return "\n".join(lines + _methods()) + "\n"


def _methods() -> list[str]:
    """Every method of the papers, and ours, as a row of what makes it differ from the default."""
    names = [field.name for field in fields(Method)]
    default = Method()
    cells = [_value(getattr(default, name)) for name in names]
    lines = [
        "",
        "## Methods",
        "",
        "What `policy.method` names. An empty cell is the value of the first row. Numbers are "
        "where tuning starts, not where it ends.",
        "",
        f"| method | {' | '.join(names)} |",
        "|---" * (len(names) + 1) + "|",
        f"| (default) | {' | '.join(cells)} |",
    ]
    for label, method in METHODS.items():
        values = [(getattr(method, name), getattr(default, name)) for name in names]
        cells = ["" if value == usual else _value(value) for value, usual in values]
        lines.append(f"| `{label}` | {' | '.join(cells)} |")
    return lines


def _type(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(rule, name):,}"
        for rule in field.metadata
        for name, sign in _BOUNDS.items()
        if getattr(rule, name, None) is not None
    ]
    return ", ".join([_name(field.annotation), *bounds])


def _name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"list of {_name(get_args(annotation)[0])}"
    names = [_name(part) for part in get_args(annotation) if part is not NoneType]
    return " or ".join(names) or str(annotation.__name__)


def _value(default: Any) -> str:
    if default in (None, ()):
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)
