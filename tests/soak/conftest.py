"""The cluster of the end-to-end tests."""

from tests.e2e.conftest import cluster_url, deploy

__all__ = ["cluster_url", "deploy"]
