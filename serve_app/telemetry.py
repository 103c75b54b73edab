"""What the endpoint tells its operators: one log line and some counts per request.

Metrics go to a sink, so that nothing here needs Ray; `RayMetrics` is Prometheus by way of Ray.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from policies.types import Origin
from serve_app.answer import Answer
from serve_app.errors import ApiError

logger = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
CLIENT_LEFT = 499  # nginx's status for it; no client sees it
_PLAIN_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_MS = (10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000)


@dataclass(frozen=True, slots=True)
class Metric:
    """One exported metric; Ray puts `ray_` before a name and `_total` after a counter's."""

    name: str
    kind: str
    tags: tuple[str, ...]
    meaning: str


METRICS = (
    Metric("outrider_requests", "counter", ("endpoint", "status"), "requests answered"),
    Metric("outrider_cancelled", "counter", (), "answers begun that their clients left"),
    Metric("outrider_failed", "counter", (), "answers that an error ended"),
    Metric("outrider_degraded", "counter", (), "answers that went on without a drafter"),
    Metric("outrider_prompt_tokens", "counter", (), "prompt tokens"),
    Metric(
        "outrider_tokens", "counter", ("origin",), "committed tokens: accepted, recovered, bonus"
    ),
    Metric("outrider_drafted_tokens", "counter", (), "draft tokens"),
    Metric("outrider_navs", "counter", (), "verifications requested"),
    Metric("outrider_resends", "counter", (), "messages repeated after silence or a gap"),
    Metric("outrider_reopens", "counter", (), "sessions opened again on a verifier"),
    Metric("outrider_uplink_bytes", "counter", (), "bytes of messages to the verifier"),
    Metric("outrider_downlink_bytes", "counter", (), "bytes of verdicts"),
    Metric("outrider_ttft_ms", "histogram", (), "time to the first token, of a request"),
    Metric("outrider_tpt_ms", "histogram", (), "generation time per committed token, of a request"),
    Metric("outrider_open_sessions", "gauge", (), "choices that the driver has admitted"),
    Metric("outrider_drafter_sessions", "gauge", (), "sessions that the drafter holds"),
    Metric("outrider_verifier_sessions", "gauge", (), "sessions that the verifier holds"),
)


class MetricsSink(Protocol):
    """Where figures go, by the names and tags of METRICS."""

    def add(self, name: str, value: float, **tags: str) -> None:
        """Count."""

    def observe(self, name: str, value: float) -> None:
        """Put into a histogram."""

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""


class RayMetrics:
    """A MetricsSink in a Serve replica, which adds tags for application, deployment and replica."""

    def __init__(self, names: Sequence[str]) -> None:
        from ray.serve import metrics

        self._metrics: dict[str, Any] = {}
        for metric in METRICS:
            if metric.name not in names:
                continue
            match metric.kind:
                case "counter":
                    made = metrics.Counter(metric.name, metric.meaning, metric.tags)
                case "histogram":
                    made = metrics.Histogram(metric.name, metric.meaning, list(_MS), metric.tags)
                case _:
                    made = metrics.Gauge(metric.name, metric.meaning, metric.tags)
            self._metrics[metric.name] = made

    def add(self, name: str, value: float, **tags: str) -> None:
        if value:  # Ray refuses to add nothing
            self._metrics[name].inc(value, tags)

    def observe(self, name: str, value: float) -> None:
        self._metrics[name].observe(value)

    def set(self, name: str, value: float) -> None:
        self._metrics[name].set(value)


class Observe:
    """ASGI middleware: a request id for every request, and at its end a log line and the counts.

    A route that generates leaves its Answer in `request.state.answer`. A defect is logged and
    answered 500; a client that left before any response counts as CLIENT_LEFT. A client that
    cannot be heard any more has left.
    """

    def __init__(self, app: ASGIApp, sink: MetricsSink) -> None:
        self._app = app
        self._sink = sink

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if _PLAIN_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})
        status: int | None = None
        started = time.perf_counter()

        async def tell_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if given != request_id:  # else whoever gave the id tells it: Serve's proxy does
                    MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        async def hear() -> Message:
            try:
                return await receive()
            except Exception as error:  # Serve's way to say that its proxy gave the request up
                logger.debug("request %s cannot be heard any more: %r", request_id, error)
                return {"type": "http.disconnect"}

        try:
            await self._app(scope, hear, tell_id)
        except Exception:
            logger.exception("request %s", request_id, extra={"request_id": request_id})
            if status is not None:
                raise  # which breaks off the response that has begun
            await ApiError(500, "internal error").response()(scope, receive, tell_id)
        finally:
            elapsed_ms = (time.perf_counter() - started) * 1000.0
            self._record(scope, request_id, status or CLIENT_LEFT, elapsed_ms)

    def _record(self, scope: Scope, request_id: str, status: int, elapsed_ms: float) -> None:
        endpoint = _endpoint(scope)
        self._sink.add("outrider_requests", 1, endpoint=endpoint, status=str(status))
        details: dict[str, Any] = {}
        answer: Answer | None = scope["state"].get("answer")
        if answer is not None:
            details = self._count(answer)
        elif endpoint in ("/health", "/ready"):
            return  # probes would fill the log
        logger.info(
            "%s %s %d %.0f ms%s",
            scope["method"],
            endpoint,
            status,
            elapsed_ms,
            "".join(f" {name}={details[name]}" for name in ("outcome", "mode") if name in details),
            extra={"request_id": request_id, "status": status, "elapsed_ms": elapsed_ms} | details,
        )

    def _count(self, answer: Answer) -> dict[str, Any]:
        """Add the answer to the metrics; what the log says of it."""
        metrics, usage, sink = answer.metrics, answer.usage, self._sink
        outcome = "failed" if answer.error else "finished" if answer.finished else "cancelled"
        if outcome != "finished":
            sink.add(f"outrider_{outcome}", 1)
        sink.add("outrider_degraded", answer.mode == "degraded")
        sink.add("outrider_prompt_tokens", usage["prompt_tokens"])
        for origin in Origin:
            sink.add("outrider_tokens", getattr(metrics, origin), origin=origin)
        sink.add("outrider_drafted_tokens", metrics.drafted)
        for name in ("navs", "resends", "reopens", "uplink_bytes", "downlink_bytes"):
            sink.add(f"outrider_{name}", getattr(metrics, name))
        if metrics.ttft_ms is not None and metrics.tpt_ms is not None:
            sink.observe("outrider_ttft_ms", metrics.ttft_ms)
            sink.observe("outrider_tpt_ms", metrics.tpt_ms)
        return {
            "answer": answer.id,
            "outcome": outcome,
            "error": None if answer.error is None else str(answer.error),
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "sessions": [choice.generation.name for choice in answer.choices],
            **answer.report,
        }


def _endpoint(scope: Scope) -> str:
    """The path of the route, also of a request that never reached it; else "other".

    So a client cannot make up new tag values.
    """
    for route in scope["app"].routes if "app" in scope else ():
        if route.matches(scope)[0] is not Match.NONE:
            return str(route.path)
    return "other"


def log_with_serve() -> None:
    """Our loggers write where this replica's Serve logger does, in its format and at its level."""
    serve_logger = logging.getLogger("ray.serve")
    for name in ("deployments", "serve_app"):
        ours = logging.getLogger(name)
        ours.handlers = serve_logger.handlers
        ours.setLevel(serve_logger.level)
        ours.propagate = False
