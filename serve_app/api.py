"""The OpenAI-compatible HTTP API in front of one driver."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from deployments.driver import Driver, GenerationRequest, Models
from deployments.engines.protocol import ChatTemplateError
from policies.controller import Learned
from policies.regimes import measured
from policies.session import SessionConfig
from policies.types import Ids
from serve_app.answer import Answer, Telling
from serve_app.auth import RequireKey
from serve_app.choice import Choice
from serve_app.config import HttpArgs, PolicyArgs
from serve_app.errors import ApiError, ErrorBody, install_error_handlers
from serve_app.learned_file import LearnedFiles, keep, learned_files, restore
from serve_app.limits import LimitBody
from serve_app.openai_types import ChatRequest, CompletionRequest
from serve_app.sampling_params import check_ids, check_request, sampling_params, seed_of_choice
from serve_app.shapes import CHAT, COMPLETION, Shape
from serve_app.sse import EventStream
from serve_app.strict_json import StrictJsonRoute
from serve_app.surroundings import Surroundings
from serve_app.telemetry import REQUEST_ID, MetricsSink, Observe
from serve_app.text import TextStream

logger = logging.getLogger(__name__)

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody},
    "5XX": {"model": ErrorBody},
}


class Ready(BaseModel):
    """Both models are loaded."""

    status: Literal["ready"] = "ready"
    draft: str
    target: str


class NotReady(BaseModel):
    """What /ready says until then: no error object, since nothing was asked for in vain."""

    status: Literal["loading", "failed"]
    missing: list[str] = []  # of "draft" and "target"
    deployments: dict[str, str] = {}  # what Serve says of those that are not healthy
    error: str | None = None  # why the two models cannot serve together


async def _no_troubles() -> dict[str, str]:
    return {}


class Api:
    """Answers requests with a driver that it starts when the server starts.

    `policy` is by what the sessions are controlled, and what of them is learned; None: they go by
    `config` alone.
    `troubles` tells what keeps a model from loading, by deployment.
    """

    def __init__(
        self,
        driver: Driver,
        config: SessionConfig,
        http: HttpArgs,
        *,
        sink: MetricsSink,
        policy: PolicyArgs | None = None,
        key_digests: tuple[bytes, ...] = (),
        troubles: Callable[[], Awaitable[Mapping[str, str]]] = _no_troubles,
    ) -> None:
        self._driver = driver
        self._config = config
        self._http = http
        self._sink = sink
        self._policy = policy
        self.learned = None if policy is None else Learned(policy.chosen())
        self._key_digests = key_digests
        self._troubles = troubles
        self.learned_files: LearnedFiles | None = None  # where it is kept, once looked for
        self._starting: asyncio.Task[None] | None = None
        self._num_open = 0  # choices admitted and not yet over
        self.defect: str | None = None  # why the two models cannot serve together

    def asgi(self) -> FastAPI:
        """The FastAPI application."""
        app = FastAPI(title="Outrider", lifespan=self._lifespan)
        install_error_handlers(app)
        app.router.route_class = StrictJsonRoute
        app.get("/health")(self.health)
        app.get("/ready", response_model=Ready, responses={503: {"model": NotReady}})(self.ready)
        app.get("/environment", responses=_ERRORS)(self.environment)
        app.get("/v1/models", responses=_ERRORS)(self.list_models)
        app.get("/v1/models/{model:path}", responses=_ERRORS)(self.show_model)
        app.post("/v1/chat/completions", response_model=None, responses=_ERRORS)(self.chat)
        app.post("/v1/completions", response_model=None, responses=_ERRORS)(self.complete)
        # the last one added sees a request first, and an answer last
        app.add_middleware(LimitBody, max_bytes=self._http.max_body_bytes)
        app.add_middleware(
            RequireKey, digests=self._key_digests, anonymous=self._http.allow_anonymous
        )
        app.add_middleware(Observe, sink=self._sink)
        if self._http.cors_origins:
            app.add_middleware(
                CORSMiddleware,
                allow_origins=self._http.cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],  # the official JavaScript client sends some of its own
                expose_headers=[REQUEST_ID, "retry-after"],
            )
        return app

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self._starting = asyncio.create_task(self._start())
        try:
            yield
        finally:
            self._starting.cancel()
            with suppress(asyncio.CancelledError):
                await self._starting

    async def _start(self) -> None:
        try:
            await self._driver.start()
        except Exception as error:
            logger.exception("the models cannot serve")
            self.defect = str(error)
            return
        policy, models = self._policy, self._driver.models
        if self.learned is not None and policy is not None and policy.state_dir and models:
            files = learned_files(policy.state_dir, models, policy.method, policy.chosen())
            restore(files, self.learned)
            self.learned_files = files
            await keep(files, self.learned)

    # ---- routes

    async def health(self) -> dict[str, str]:
        """The process answers."""
        return {"status": "ok"}

    async def ready(self) -> Response:
        """200 only when draft and target are loaded; else 503 and what is missing, and why."""
        models = self._driver.models
        if models is not None:
            ready = Ready(draft=models.draft.name, target=models.target.name)
            return JSONResponse(ready.model_dump())
        if self.defect is not None:
            state = NotReady(status="failed", error=self.defect)
        else:
            state = NotReady(status="loading", missing=self._driver.missing)
            try:
                state.deployments = dict(await self._troubles())
            except Exception as error:  # a probe needs its answer all the same
                logger.warning("nothing tells what keeps the models from loading: %r", error)
        headers = {"Retry-After": "5"} if state.status == "loading" else None
        return JSONResponse(state.model_dump(), status_code=503, headers=headers)

    async def environment(self) -> Surroundings:
        """What this edge node's sessions have measured; 503 before they have measured enough."""
        self._models()
        learned = self.learned
        snapshot = None if learned is None else measured(learned)
        if learned is None or snapshot is None:
            raise ApiError(
                503,
                "too little is measured yet: it takes a few requests that draft",
                code="not_measured",
            )
        decision = None if learned.modes is None else learned.modes.decision
        return Surroundings.of(snapshot, learned.method.objective, decision)

    async def list_models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._card(self._models())]}

    async def show_model(self, model: str) -> dict[str, Any]:
        models = self._models()
        self._check_model(model, models)
        return self._card(models)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        models = self._check(body, num_prompts=1)
        try:
            messages = [message.for_template() for message in body.messages]
            prompt = await asyncio.to_thread(models.tokenizer.encode_chat, messages)
        except ChatTemplateError as error:
            param = "messages" if error.index is None else f"messages.{error.index}"
            raise ApiError(400, f"{param}: {error}", param=param) from error
        return await self._answer(body, {"messages": tuple(prompt)}, CHAT, models, request)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        given = body.prompts
        models = self._check(body, num_prompts=len(given))
        prompts: dict[str, Ids] = {}
        for i, prompt in enumerate(given):
            param = "prompt" if len(given) == 1 else f"prompt.{i}"
            if isinstance(prompt, str):
                prompt = await asyncio.to_thread(models.tokenizer.encode, prompt)
            else:
                check_ids(prompt, models.target, param)
            prompts[param] = tuple(prompt)
        return await self._answer(body, prompts, COMPLETION, models, request)

    # ---- one request

    def _models(self) -> Models:
        if self.defect is not None:
            raise ApiError(503, f"the models cannot serve: {self.defect}")
        if self._driver.models is None:
            raise ApiError(503, f"still loading: {', '.join(self._driver.missing)}")
        return self._driver.models

    def _card(self, models: Models) -> dict[str, Any]:
        return {
            "id": models.target.name,
            "object": "model",
            "created": 0,
            "owned_by": "outrider",
            "max_model_len": models.target.context,
        }

    def _check_model(self, name: str, models: Models) -> None:
        if name != models.target.name:
            raise ApiError(
                404,
                f"model {name} does not exist; this server has {models.target.name}",
                param="model",
                code="model_not_found",
            )

    def _check(self, body: ChatRequest | CompletionRequest, num_prompts: int) -> Models:
        """Refuse all that can be refused before a prompt is turned into ids."""
        models = self._models()
        self._check_room(1)
        if body.model:
            self._check_model(body.model, models)
        check_request(body, self._http, models.target)
        if num_prompts * body.n > self._http.max_choices:
            param = "prompt" if body.n == 1 else "n"
            most = self._http.max_choices
            raise ApiError(400, f"{param}: at most {most} choices in one request", param=param)
        return models

    async def _answer(
        self,
        body: ChatRequest | CompletionRequest,
        prompts: Mapping[str, Ids],
        shape: Shape,
        models: Models,
        request: Request,
    ) -> Response:
        """Answer `n` choices per prompt; `prompts` are by the field that each came in."""
        wanted = []
        for param, prompt in prompts.items():
            # without a seed, prompts that are alike get texts of their own too
            seed = secrets.randbits(64) if body.seed is None else body.seed
            wanted += [
                self._generation_request(body, prompt, param, seed_of_choice(seed, i), models)
                for i in range(body.n)
            ]
        answer = Answer(
            self._choices(wanted, body.stop_strings, models),
            models,
            Telling(shape, body.off, body.stream_options.include_usage, body.outrider.tokens),
            sum(map(len, prompts.values())),
        )
        self._admit(len(wanted))
        request.state.answer = answer
        if body.stream:
            return EventStream(answer.events(), on_end=lambda: self._release(len(wanted)))
        try:
            return JSONResponse(await answer.whole())
        finally:
            self._release(len(wanted))

    def _choices(
        self, wanted: Sequence[GenerationRequest], stop: Sequence[str], models: Models
    ) -> list[Choice]:
        return [
            Choice(
                index,
                request.prompt,
                self._driver.open(request),
                TextStream(models.tokenizer, stop, min_tokens=request.sampling.min_tokens),
            )
            for index, request in enumerate(wanted)
        ]

    def _check_room(self, count: int) -> None:
        """Refuse what would wait too long: at once, and before any work is put into it."""
        if self._num_open + count > self._http.max_sessions:
            raise ApiError(
                503,
                f"overloaded: {self._num_open} of {self._http.max_sessions} sessions are open",
                code="overloaded",
            )

    def _admit(self, count: int) -> None:
        self._check_room(count)
        self._num_open += count
        self._sink.set("outrider_open_sessions", self._num_open)

    def _release(self, count: int) -> None:
        self._num_open -= count
        self._sink.set("outrider_open_sessions", self._num_open)

    def _generation_request(
        self,
        body: ChatRequest | CompletionRequest,
        prompt: Ids,
        param: str,
        seed: int,
        models: Models,
    ) -> GenerationRequest:
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
            sampling=sampling_params(body, seed, models.target),
            max_tokens=min(body.token_limit or room, room),
            config=replace(self._config, speculate=False) if body.off else self._config,
            learned=None if body.off else self.learned,
        )
