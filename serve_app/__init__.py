"""Composes: `serve run serve_app:graph`. Importing this package does not import Ray."""

from __future__ import annotations

from typing import Any

__all__ = ["graph"]


def __getattr__(name: str) -> Any:
    # Ray Serve looks `graph` up here; the command line must work on an edge device without Ray.
    if name == "graph":
        from serve_app.app import graph

        return graph
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
