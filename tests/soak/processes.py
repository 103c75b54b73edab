"""Memory of the Serve processes of the cluster under test."""

from __future__ import annotations

import re
from pathlib import Path

import ray


def serve_processes() -> dict[str, int]:
    """Actor name → process id of every live replica, proxy and controller."""
    return {
        actor["Name"]: actor["Pid"]
        for actor in ray._private.state.actors().values()
        if actor["State"] == "ALIVE" and actor["Name"].startswith("SERVE_")
    }


def private_mib(pid: int) -> float:
    """Anonymous memory of a process, swapped out or not."""
    status = Path(f"/proc/{pid}/status").read_text()
    kib = [int(re.search(rf"{key}:\s+(\d+) kB", status)[1]) for key in ("RssAnon", "VmSwap")]  # type: ignore[index]
    return sum(kib) / 1024


def slopes(samples: list[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """MiB per 1,000 requests of each process: least squares over (requests, MiB by process)."""
    import numpy as np

    counts = np.array([count for count, _ in samples], float) / 1000
    names = set.intersection(*(set(sizes) for _, sizes in samples))
    return {
        name: float(np.polyfit(counts, [sizes[name] for _, sizes in samples], 1)[0])
        for name in sorted(names)
    }
