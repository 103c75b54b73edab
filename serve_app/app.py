"""The deployment graph: `serve run serve_app:graph key=value…`. The only place with `.bind()`."""

# no `from __future__ import annotations`: Serve reads GraphArgs from the builder's annotation

import asyncio
import logging
import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import click
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ServeStatus

from deployments.drafter import EdgeDrafter
from deployments.driver import Driver
from deployments.engines.protocol import Engine
from deployments.link import RayDrafterLink, RayVerifierLink
from deployments.placement import Placement, place
from deployments.routing import LocalNodeRouter, StickyRouter
from deployments.verifier import CloudVerifier
from serve_app import weights
from serve_app.api import Api
from serve_app.auth import key_digests
from serve_app.config import GraphArgs, ModelArgs, ScriptedArgs
from serve_app.telemetry import METRICS, RayMetrics, log_with_serve

logger = logging.getLogger(__name__)

_STICKY = RequestRouterConfig(
    request_router_class=StickyRouter,
    request_router_kwargs={"num_fallback_replicas": 0},
)
_LOCAL = RequestRouterConfig(request_router_class=LocalNodeRouter)
# http.max_sessions and the places in the engines limit the sessions; if Serve limited the calls, a
# health check or a short call of a running session would wait behind the streams
_ANY_NUMBER = 1_000_000


_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Mismatch)\b")
_SESSION_GAUGES = ("outrider_drafter_sessions", "outrider_verifier_sessions")


class DriverIngress:
    """The Driver deployment: HTTP in front of the driver of one edge node."""

    def __init__(
        self,
        drafter: DeploymentHandle,
        verifier: DeploymentHandle,
        args: GraphArgs,
        key_digests: tuple[bytes, ...],
    ) -> None:
        log_with_serve()
        self._api = Api(
            Driver(RayDrafterLink(drafter), RayVerifierLink(verifier)),
            args.policy.session_config(),
            args.http,
            policy=args.policy,
            sink=RayMetrics([m.name for m in METRICS if m.name not in _SESSION_GAUGES]),
            key_digests=key_digests,
            troubles=self._troubles,
        )
        self._application = serve.get_replica_context().app_name
        self._status: asyncio.Task[ServeStatus] | None = None

    def __serve_build_asgi_app__(self) -> Any:
        return self._api.asgi()

    async def _troubles(self) -> dict[str, str]:
        """What Serve says of our deployments that are not healthy, by name."""
        if self._status is None or self._status.done():
            # one question at a time: where the controller hangs, so does its thread
            self._status = asyncio.create_task(asyncio.to_thread(serve.status))
        async with asyncio.timeout(5):
            status = await asyncio.shield(self._status)
        return {
            name: f"{deployment.status.value}: {cause_of(deployment.message)}".strip(": ")
            for name, deployment in status.applications[self._application].deployments.items()
            if deployment.status.value != "HEALTHY"
        }

    async def check_health(self) -> None:
        if self._api.defect is not None:
            raise RuntimeError(self._api.defect)


class DrafterReplica(EdgeDrafter):
    """The EdgeDrafter deployment."""

    def __init__(self, args: GraphArgs) -> None:
        log_with_serve()
        super().__init__(draft_engine(args), on_sessions=_gauge("outrider_drafter_sessions"))


class VerifierReplica(CloudVerifier):
    """The CloudVerifier deployment."""

    def __init__(self, args: GraphArgs) -> None:
        log_with_serve()
        super().__init__(
            target_engine(args),
            max_window=args.policy.chosen().max_window,
            on_sessions=_gauge("outrider_verifier_sessions"),
        )


def graph(args: GraphArgs) -> serve.Application:
    """Driver and EdgeDrafter on the edge nodes, CloudVerifier replicas on the cloud's.

    Raises PlacementError if the cluster's node labels leave one of them without a node,
    WeightsError if the name of a model is not known, and ValueError for unusable API keys.
    """
    for model in (args.draft, args.verifier):
        if model.engine == "llama" and not model.model.endswith(".gguf"):
            weights.find(model.model)  # a path is another node's matter
    digests = key_digests(args.http.api_key_file, os.environ)
    placement = _placement()
    common = _common_options(args)
    drafter = serve.deployment(
        DrafterReplica,
        name="EdgeDrafter",
        num_replicas=placement.num_edge_nodes,
        max_replicas_per_node=1,
        max_ongoing_requests=_ANY_NUMBER,
        request_router_config=_LOCAL,
        **common,
        ray_actor_options=_actor_options(args.draft.num_cpus, placement.edge_selector),
    ).bind(args)
    verifier = serve.deployment(
        VerifierReplica,
        name="CloudVerifier",
        num_replicas=args.verifier.num_replicas,
        max_ongoing_requests=_ANY_NUMBER,
        request_router_config=_STICKY,
        **common,
        ray_actor_options=_actor_options(args.verifier.num_cpus, placement.cloud_selector)
        | {"num_gpus": args.verifier.num_gpus},
    ).bind(args)
    return serve.deployment(
        serve.ingress()(DriverIngress),
        name="Driver",
        num_replicas=placement.num_edge_nodes,
        max_replicas_per_node=1,
        max_ongoing_requests=_ANY_NUMBER,
        **common,
        ray_actor_options=_actor_options(0.1, placement.edge_selector),
    ).bind(drafter, verifier, args, digests)


def _common_options(args: GraphArgs) -> dict[str, Any]:
    """Of every deployment."""
    return {
        "logging_config": {
            "encoding": args.log.format.upper(),
            "log_level": args.log.level,
            # Serve would log every call, several a round; the API logs every request itself
            "enable_access_log": False,
        },
        "graceful_shutdown_timeout_s": args.http.grace_s,
    }


def draft_engine(args: GraphArgs) -> Callable[[], Engine]:
    """A picklable factory of the draft engine, called in the replica."""
    scripted = args.scripted
    return _engine(args.draft, scripted, scripted.agreement, scripted.draft_ms)


def target_engine(args: GraphArgs) -> Callable[[], Engine]:
    """A picklable factory of the target engine, called in the replica."""
    return _engine(args.verifier, args.scripted, 1.0, args.scripted.verify_ms)


def _engine(
    model: ModelArgs, scripted: ScriptedArgs, agreement: float, forward_ms: float
) -> Callable[[], Engine]:
    if model.engine == "scripted":
        return partial(_scripted_engine, model, scripted, agreement, forward_ms)
    return partial(_llama_engine, model)


def _scripted_engine(
    model: ModelArgs, scripted: ScriptedArgs, agreement: float, forward_ms: float
) -> Engine:
    from deployments.engines.scripted import ScriptedEngine, ToyModel

    return ScriptedEngine(
        ToyModel(scripted.seed, agreement, scripted.end_every),
        context=model.context,
        max_sessions=model.max_sessions,
        forward_ms=forward_ms,
    )


def _llama_engine(model: ModelArgs) -> Engine:
    from deployments.engines.llama import LlamaEngine

    engine: Engine = LlamaEngine(
        weights.resolve(model.model),
        name=model.model,
        context=model.context,
        max_sessions=model.max_sessions,
        threads=model.threads or os.cpu_count() or 1,
        stall_s=model.stall_s,
    )
    return engine


def _gauge(name: str) -> Callable[[int], None]:
    sink = RayMetrics([name])
    return partial(sink.set, name)


def cause_of(message: str) -> str:
    """The exception at the end of a traceback, and not the paths and addresses before it."""
    lines = [line for line in message.splitlines() if line.strip()]
    raised = [i for i, line in enumerate(lines) if _EXCEPTION.match(line)]
    return " ".join(line.strip() for line in lines[raised[-1] if raised else -1 :])[:400]


def _actor_options(num_cpus: float, selector: dict[str, str]) -> dict[str, Any]:
    return {"num_cpus": num_cpus} | ({"label_selector": selector} if selector else {})


def _placement() -> Placement:
    """Where things go in the cluster that `serve run` is about to use."""
    if not ray.is_initialized():
        # `serve run` builds the graph before it connects; labels are known only to the cluster
        ray.init(namespace="serve", **_serve_run_options())
    nodes = [node["Labels"] for node in ray.nodes() if node["Alive"]]
    placement = place(nodes)
    if placement.edge_selector:
        logger.warning("edge deployments go to %d labelled node(s)", placement.num_edge_nodes)
    else:
        logger.warning("one node without tier labels: edge and cloud both run on it")
    return placement


def _serve_run_options() -> dict[str, Any]:
    """The address and runtime environment that the user gave `serve run`."""
    from ray.serve.scripts import parse_runtime_env_args

    context = click.get_current_context(silent=True)
    if context is None or context.info_name != "run":
        return {}
    given = context.params
    names = ("runtime_env", "runtime_env_json", "working_dir")
    environment = parse_runtime_env_args(**{name: given.get(name) for name in names})
    return {"address": given.get("address"), "runtime_env": environment}
