"""The OpenAI-compatible HTTP API in front of one driver."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from deployments.driver import Driver, GenerationRequest, Models
from deployments.engines.protocol import ChatTemplateError
from policies.session import SessionConfig
from policies.types import Ids, SamplingParams
from serve_app.answer import CHAT, COMPLETION, Answer, Shape
from serve_app.config import HttpArgs
from serve_app.errors import ApiError, install_error_handlers
from serve_app.limits import LimitBody
from serve_app.openai_types import ChatRequest, CompletionRequest
from serve_app.sse import EventStream
from serve_app.text import TextStream

logger = logging.getLogger(__name__)


class Api:
    """Answers requests with a driver that it starts when the server starts."""

    def __init__(self, driver: Driver, config: SessionConfig, http: HttpArgs) -> None:
        self._driver = driver
        self._config = config
        self._http = http
        self._starting: asyncio.Task[None] | None = None
        self.defect: str | None = None  # why the two models cannot serve together

    def asgi(self) -> FastAPI:
        """The FastAPI application."""
        app = FastAPI(title="Outrider", lifespan=self._lifespan)
        install_error_handlers(app)
        app.add_middleware(LimitBody, max_bytes=self._http.max_body_bytes)
        app.get("/health")(self.health)
        app.get("/ready")(self.ready)
        app.get("/v1/models")(self.list_models)
        app.post("/v1/chat/completions", response_model=None)(self.chat)
        app.post("/v1/completions", response_model=None)(self.complete)
        return app

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self._starting = asyncio.create_task(self._start())
        try:
            yield
        finally:
            self._starting.cancel()

    async def _start(self) -> None:
        try:
            await self._driver.start()
        except Exception as error:
            logger.exception("the models cannot serve")
            self.defect = str(error)

    # ---- routes

    async def health(self) -> dict[str, str]:
        """The process answers."""
        return {"status": "ok"}

    async def ready(self) -> Response:
        """200 only when draft and target are loaded; else 503 and what is missing."""
        models = self._driver.models
        if models is not None:
            return JSONResponse(
                {"status": "ready", "draft": models.draft.name, "target": models.target.name}
            )
        if self.defect is not None:
            return JSONResponse({"status": "failed", "error": self.defect}, status_code=503)
        missing = self._driver.missing
        return JSONResponse({"status": "loading", "missing": missing}, status_code=503)

    async def list_models(self) -> dict[str, Any]:
        models = self._models()
        card = {"id": models.target.name, "object": "model", "created": 0, "owned_by": "outrider"}
        return {"object": "list", "data": [card]}

    async def chat(self, body: ChatRequest) -> Response:
        models = self._models()
        try:
            messages = [message.model_dump() for message in body.messages]
            prompt = await asyncio.to_thread(models.tokenizer.encode_chat, messages)
        except ChatTemplateError as error:
            raise ApiError(400, str(error), param="messages") from error
        return await self._answer(body, tuple(prompt), CHAT)

    async def complete(self, body: CompletionRequest) -> Response:
        prompt = await asyncio.to_thread(self._models().tokenizer.encode, body.prompt)
        return await self._answer(body, tuple(prompt), COMPLETION)

    # ---- one request

    def _models(self) -> Models:
        if self.defect is not None:
            raise ApiError(503, f"the models cannot serve: {self.defect}")
        if self._driver.models is None:
            raise ApiError(503, f"still loading: {', '.join(self._driver.missing)}")
        return self._driver.models

    async def _answer(
        self, body: ChatRequest | CompletionRequest, prompt: Ids, shape: Shape
    ) -> Response:
        models = self._models()
        if body.model not in (None, models.target.name):
            raise ApiError(
                404,
                f"model {body.model} does not exist; this server has {models.target.name}",
                param="model",
                code="model_not_found",
            )
        answer = Answer(
            generation=self._driver.open(self._generation_request(body, prompt, models)),
            text=TextStream(models.tokenizer, self._stop_strings(body)),
            model=models.target.name,
            num_prompt_tokens=len(prompt),
            off=body.off,
            shape=shape,
        )
        if body.stream:
            return EventStream(answer.events())
        return JSONResponse(await answer.whole())

    def _generation_request(
        self, body: ChatRequest | CompletionRequest, prompt: Ids, models: Models
    ) -> GenerationRequest:
        param = "messages" if isinstance(body, ChatRequest) else "prompt"
        room = models.target.context - len(prompt)
        if not prompt:
            raise ApiError(400, f"{param}: no token to start from", param=param)
        if room < 1:
            raise ApiError(
                400,
                f"{param}: {len(prompt)} tokens leave no room in a context of "
                f"{models.target.context}",
                param=param,
                code="context_length_exceeded",
            )
        return GenerationRequest(
            prompt=prompt,
            sampling=_sampling(body),
            stop_ids=models.target.end_ids,
            max_tokens=min(body.max_tokens or room, room),
            config=replace(self._config, speculate=False) if body.off else self._config,
        )

    def _stop_strings(self, body: ChatRequest | CompletionRequest) -> list[str]:
        stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
        if len(stop) > self._http.max_stop_strings:
            raise ApiError(
                400, f"stop: at most {self._http.max_stop_strings} strings", param="stop"
            )
        if any(not 1 <= len(text) <= self._http.max_stop_chars for text in stop):
            raise ApiError(
                400,
                f"stop: every string must have 1 to {self._http.max_stop_chars} characters",
                param="stop",
            )
        return stop


def _sampling(body: ChatRequest | CompletionRequest) -> SamplingParams:
    seed = secrets.randbits(64) if body.seed is None else body.seed % 2**64
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=body.top_k or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=seed,
    )
