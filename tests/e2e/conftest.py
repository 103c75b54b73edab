"""One Ray cluster for the session: a cloud node (the head) and an edge node, by label."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from serve_app.bench.overhead import RAY_ENV

# read by every Ray process when it is imported, so before Ray is
os.environ |= RAY_ENV

Deploy = Callable[..., httpx.Client]


@pytest.fixture(scope="session")
def cluster_url() -> Iterator[str]:
    """The address of Serve's proxy on a two-node cluster that ends with the test session."""
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {"num_cpus": 4, "object_store_memory": 200 * 2**20}
    head = common | {"labels": {"outrider.io/tier": "cloud"}, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(**common, labels={"outrider.io/tier": "edge"})
        ray.init(address=cluster.address, namespace="serve", log_to_driver=False)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        if ray.is_initialized():
            serve.shutdown()
            ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def deploy(cluster_url: str) -> Iterator[Deploy]:
    """Deploys the graph with the given arguments and waits until it is ready."""
    yield from _deploy(cluster_url)


@pytest.fixture(scope="module")
def module_deploy(cluster_url: str) -> Iterator[Deploy]:
    """The same, for a module that asks one graph many things."""
    yield from _deploy(cluster_url)


def _deploy(cluster_url: str) -> Iterator[Deploy]:
    from ray import serve

    from serve_app import graph
    from serve_app.config import GraphArgs

    clients: list[httpx.Client] = []

    def deploy(**args: object) -> httpx.Client:
        serve.run(graph(GraphArgs.model_validate(args)), name="outrider", route_prefix="/")
        client = httpx.Client(base_url=cluster_url, timeout=120)
        clients.append(client)
        for _ in range(600):
            response = client.get("/ready")
            if response.status_code == 200:
                return client
            time.sleep(0.1)
        raise AssertionError(f"not ready: {response.text}")

    try:
        yield deploy
    finally:
        for client in clients:
            client.close()
        serve.delete("outrider")
