"""Memory, gauges and logs of the Serve processes of the cluster under test."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
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
    names = samples[0][1].keys()
    assert all(sizes.keys() == names for _, sizes in samples), "a process was replaced"
    return {
        name: float(np.polyfit(counts, [sizes[name] for _, sizes in samples], 1)[0])
        for name in sorted(names)
    }


def exported(prefix: str) -> dict[str, float]:
    """Every figure that Ray exports under a name with this prefix, by name and labels."""
    values = {}
    for node in ray.nodes():
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for line in httpx.get(url).text.splitlines():
            if line.startswith(prefix):
                name, _, value = line.rpartition(" ")
                values[name] = float(value)
    return values


def sessions() -> dict[str, float]:
    """The session gauges of every replica; Ray exports one some seconds after it was set."""
    values = exported("ray_outrider_")
    return {name: value for name, value in values.items() if "_sessions{" in name}


def all_over(gauges: dict[str, float]) -> bool:
    """Whether the driver, the drafter and the verifier all say that they hold no session."""
    kinds = {name.partition("{")[0].removeprefix("ray_outrider_") for name in gauges}
    told = kinds == {"open_sessions", "drafter_sessions", "verifier_sessions"}
    return told and not any(gauges.values())


def replica_logs(processes: dict[str, int]) -> str:
    """All that these replicas have logged."""
    logs = Path(ray._private.worker._global_node.get_logs_dir_path()) / "serve"
    names = [name.removeprefix("SERVE_REPLICA::").replace("#", "_") for name in processes]
    files = [logs / f"replica_{name}.log" for name in names if name.startswith("outrider_")]
    assert len(files) == 3
    return "".join(file.read_text(errors="replace") for file in files)
