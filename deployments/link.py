"""How the driver reaches a drafter and a verifier, wherever they run.

`EdgeDrafter` and `CloudVerifier` satisfy these protocols themselves, for a driver in the same
process. Ray is imported only by the Ray links, so an edge client outside the cluster needs none.
"""

from __future__ import annotations

import contextvars
import pickle
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple, Protocol

from deployments.engines.protocol import ModelInfo
from policies.events import GrantDraft, RewindDrafter
from policies.types import Batch, Close, Open, SamplingParams, Verdict, VerdictKind


class LinkError(Exception):
    """The other side died or cannot be reached; another attempt may find it again."""


class DraftToken(NamedTuple):
    """One draft token as the drafter streams it."""

    epoch: int
    position: int
    id: int
    confidence: float
    entropy: float


def message_bytes(message: Open | Batch | Verdict | Close) -> int:
    """The size of a message as Ray carries it, by value; what Ray puts around it not counted."""
    return len(pickle.dumps(message, protocol=5))


class DrafterLink(Protocol):
    async def describe(self) -> ModelInfo:
        """The draft model, once it is loaded. Raises LinkError, as every method may."""

    def open(
        self, session: str, ids: Sequence[int], sampling: SamplingParams, grant: GrantDraft
    ) -> AsyncGenerator[DraftToken, None]:
        """Draft after `ids` as far as credit goes; closing the iterator closes the session."""

    async def steer(
        self, session: str, rewind: RewindDrafter | None, grant: GrantDraft | None
    ) -> None:
        """Rewind, then extend the credit."""


class VerifierLink(Protocol):
    async def describe(self) -> ModelInfo:
        """The target model, once it is loaded. Raises LinkError, as every method may."""

    def open(self, opening: Open) -> AsyncGenerator[Verdict, None]:
        """The session's verdicts; closing the iterator closes the session."""

    async def push(self, batch: Batch) -> Verdict | None:
        """Hand over a batch; a verdict at once only where no session's stream can carry it."""

    async def close(self, message: Close) -> None:
        """Forget the session; its stream ends."""


class RayDrafterLink:
    """A drafter behind a Serve deployment handle. Any failure raises LinkError."""

    def __init__(self, handle: Any) -> None:
        by_value = handle.options(_by_reference=False)
        self._describe = handle.describe
        self._open = by_value.open.options(stream=True)
        self._steer = by_value.steer

    async def describe(self) -> ModelInfo:
        return await _described("drafter", self._describe)

    async def open(
        self, session: str, ids: Sequence[int], sampling: SamplingParams, grant: GrantDraft
    ) -> AsyncGenerator[DraftToken, None]:
        stream = _call(self._open, session, tuple(ids), sampling, grant)
        try:
            async for token in stream:
                yield token
        except _ray_errors() as error:
            raise LinkError(f"drafter: {error}") from error
        finally:
            stream.cancel()  # nothing else stops a Serve stream

    async def steer(
        self, session: str, rewind: RewindDrafter | None, grant: GrantDraft | None
    ) -> None:
        try:
            await _call(self._steer, session, rewind, grant)
        except _ray_errors() as error:
            raise LinkError(f"drafter: {error}") from error


class RayVerifierLink:
    """Verifier replicas behind a Serve deployment handle; a session sticks to one replica.

    The replica's death raises LinkError; an exception inside it is an `error` verdict's matter.
    """

    def __init__(self, handle: Any) -> None:
        self._describe = handle.describe
        self._by_value = handle.options(_by_reference=False)

    async def describe(self) -> ModelInfo:
        return await _described("verifier", self._describe)

    async def open(self, opening: Open) -> AsyncGenerator[Verdict, None]:
        sticky = self._by_value.options(session_id=opening.session, stream=True)
        stream = _call(sticky.open, opening)
        try:
            async for verdict in stream:
                yield verdict
        except _task_errors() as error:
            yield _defect(opening, 0, error)
        except _ray_errors() as error:
            raise LinkError(f"verifier: {error}") from error
        finally:
            stream.cancel()

    async def push(self, batch: Batch) -> Verdict | None:
        try:
            sticky = self._by_value.options(session_id=batch.session)
            verdict: Verdict | None = await _call(sticky.push, batch)
        except _task_errors() as error:
            verdict = _defect(batch, batch.start, error)
        except _ray_errors() as error:
            raise LinkError(f"verifier: {error}") from error
        return verdict

    async def close(self, message: Close) -> None:
        try:
            sticky = self._by_value.options(session_id=message.session)
            await _call(sticky.close, message)
        except _ray_errors() as error:
            raise LinkError(f"verifier: {error}") from error


async def _described(role: str, method: Any) -> ModelInfo:
    try:
        info: ModelInfo = await method.remote()
    except _task_errors():
        raise  # a defect, which no waiting mends
    except _ray_errors() as error:
        raise LinkError(f"{role}: {error}") from error
    return info


def _call(method: Any, *args: object) -> Any:
    """The response of a remote call, made in a context of its own.

    Ray 2.60's router keeps the calls of one HTTP request that it is routing under one id, so that
    of two at once it forgets the first.
    """
    return contextvars.Context().run(method.remote, *args)


def _defect(message: Open | Batch, start: int, error: Exception) -> Verdict:
    """An exception inside the verifier, as the verdict that ends the session."""
    kind = VerdictKind.ERROR
    return Verdict(message.session, message.epoch, start, kind, error=f"verifier: {error}")


def _task_errors() -> tuple[type[Exception], ...]:
    from ray.exceptions import RayTaskError

    return (RayTaskError,)


def _ray_errors() -> tuple[type[Exception], ...]:
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    return (RayError, RayServeException)
