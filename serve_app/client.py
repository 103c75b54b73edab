"""How `outrider chat` and `outrider bench` talk to an Outrider endpoint.

Nothing is repeated: a request that fails, fails. Knows no terminal and no clock.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from json import JSONDecodeError
from typing import Annotated, Any, Literal, cast

import httpx
from openai import APIConnectionError, APIError, AuthenticationError, OpenAI, Stream
from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam
from pydantic import BaseModel, Field, ValidationError

from serve_app.config import KEY_VARIABLE
from serve_app.surroundings import Surroundings

# C0 without \n and \t, DEL, C1; and lone surrogates, which no terminal and no file can take
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
NUM_ALTERNATIVES = 5

Message = dict[str, str]  # role, content


class EndpointError(OSError):
    """An endpoint that does not answer, or refuses; the message is one printable line."""


class Alternative(BaseModel):
    """An id that the target could have chosen; `logprob` is the raw log-softmax of its logits."""

    id: int
    logprob: float


class Token(BaseModel):
    """One committed token; an end token has no text. `top` is sent where it was asked for."""

    id: int
    text: str
    origin: Literal["accepted", "recovered", "bonus"]
    top: tuple[Alternative, ...] = ()


class Report(BaseModel):
    """The endpoint's own figures of one answer, as far as they are shown here."""

    mode: Literal["speculative", "off", "degraded"]
    navs: int
    drafted: int
    accepted: int
    recovered: int
    bonus: int
    accepted_at: list[int]  # accepted draft tokens by their position in their NAV
    judged_at: list[int]
    acceptance_rate: float | None
    acceptance_len: float | None
    uplink_bytes: int
    downlink_bytes: int
    tpt_ms: float | None


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: Annotated[list[_Model], Field(min_length=1)]


class _ChoiceExtension(BaseModel):
    tokens: tuple[Token, ...] = ()
    prompt_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of a stream. The texts of the tokens, joined, begin `text`.

    `prompt_ids` and `report` come with the last chunk only.
    """

    text: str
    tokens: tuple[Token, ...]
    prompt_ids: tuple[int, ...] = ()
    report: Report | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """What a request asks for; None leaves it to the endpoint."""

    method: str
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None

    @property
    def extension(self) -> dict[str, Any]:
        return {"outrider": {"method": self.method, "tokens": True}}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint that has answered. Every method raises EndpointError."""

    url: str
    model: str
    client: OpenAI

    def chat(self, messages: Sequence[Message], settings: Settings) -> Generator[Chunk, None, None]:
        """The answer as it comes; the last chunk has the report."""
        with _told_plainly(self.url):
            stream = self.client.chat.completions.create(
                model=self.model,
                messages=cast(list[ChatCompletionMessageParam], messages),
                max_tokens=settings.max_tokens,
                temperature=settings.temperature,
                seed=settings.seed,
                stream=True,
                extra_body=settings.extension,
            )
            yield from self._chunks(stream)

    def complete(self, prompt: str, settings: Settings) -> Generator[Chunk, None, None]:
        """The raw continuation of a text as it comes; the last chunk has the report."""
        with _told_plainly(self.url):
            stream = self.client.completions.create(
                model=self.model,
                prompt=prompt,
                max_tokens=settings.max_tokens,
                temperature=settings.temperature,
                seed=settings.seed,
                stream=True,
                extra_body=settings.extension,
            )
            yield from self._chunks(stream)

    def target_ids(self, prompt_ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """What the target alone, greedy, writes after these ids."""
        return tuple(token.id for token in self._target_alone(prompt_ids, max_tokens, None))

    def target_top(self, prompt_ids: Sequence[int]) -> dict[int, float]:
        """The target's most probable next ids, with their log-probabilities."""
        token = self._target_alone(prompt_ids, 1, NUM_ALTERNATIVES)[0]
        return {alternative.id: alternative.logprob for alternative in token.top}

    def surroundings(self) -> Surroundings:
        """What its edge node has measured of models and link."""
        with _told_plainly(self.url):
            found = self.client.get(f"{self.url}/environment", cast_to=object)
            return Surroundings.model_validate(found)

    def _target_alone(
        self, prompt_ids: Sequence[int], max_tokens: int, logprobs: int | None
    ) -> tuple[Token, ...]:
        with _told_plainly(self.url):
            answer = self.client.completions.create(
                model=self.model,
                prompt=list(prompt_ids),
                max_tokens=max_tokens,
                temperature=0.0,
                logprobs=logprobs,
                extra_body=Settings("off").extension,
            )
            tokens = _extension_of(answer.choices[0]).tokens
        if not tokens:
            raise EndpointError(f"{self.url}: an answer came without tokens")
        return tokens

    def _chunks(
        self, stream: Stream[ChatCompletionChunk] | Stream[Completion]
    ) -> Generator[Chunk, None, None]:
        report = None
        with stream:
            for item in stream:
                if not item.choices:
                    continue
                choice = item.choices[0]
                text = choice.text if isinstance(choice, CompletionChoice) else choice.delta.content
                sent = _extension_of(choice)
                reported = (item.model_extra or {}).get("outrider")
                report = None if reported is None else Report.model_validate(reported)
                yield Chunk(text or "", sent.tokens, sent.prompt_ids, report)
        if report is None:
            raise EndpointError(f"{self.url}: the answer ended without the report of an Outrider")


def connect(url: str) -> Endpoint:
    """The endpoint at a URL, with or without /v1 at its end, and the model that it serves.

    The API key is $OUTRIDER_API_KEY. Raises EndpointError.
    """
    root = url.rstrip("/").removesuffix("/v1")
    key = os.environ.get(KEY_VARIABLE) or "none"
    client = OpenAI(base_url=f"{root}/v1", api_key=key, max_retries=0)
    with _told_plainly(root):
        # the client's own models.list() breaks on an answer that is no JSON
        models = _Models.model_validate(client.get("/models", cast_to=object))
    return Endpoint(root, models.data[0].id, client)


def printable(text: str) -> str:
    """The text without what could steer a terminal; line breaks and tabs stay."""
    return _UNPRINTABLE.sub("", text)


def _extension_of(choice: BaseModel) -> _ChoiceExtension:
    return _ChoiceExtension.model_validate((choice.model_extra or {}).get("outrider") or {})


@contextmanager
def _told_plainly(url: str) -> Iterator[None]:
    try:
        yield
    except APIConnectionError as error:
        cause = error.__cause__ or error
        if isinstance(cause, httpx.ReadError | httpx.RemoteProtocolError):
            raise EndpointError(_one_line(f"{url} broke off its answer ({cause})")) from error
        hint = "`make serve` starts an endpoint"
        raise EndpointError(_one_line(f"no answer from {url} ({cause}); {hint}")) from error
    except AuthenticationError as error:
        message = f"{url}: {_server_message(error)}; the key is taken from ${KEY_VARIABLE}"
        raise EndpointError(_one_line(message)) from error
    except APIError as error:
        raise EndpointError(_one_line(f"{url}: {_server_message(error)}")) from error
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, (error.title, *fault["loc"]))).strip("_")
        message = f"{url} is no Outrider endpoint of this version: {where}: {fault['msg']}"
        raise EndpointError(_one_line(message)) from error
    except JSONDecodeError as error:
        raise EndpointError(_one_line(f"{url} answers with broken JSON: {error}")) from error


def _server_message(error: APIError) -> str:
    body = error.body
    said = body.get("message") if isinstance(body, dict) else None
    return said if isinstance(said, str) else error.message


def _one_line(text: str) -> str:
    return textwrap.shorten(printable(text), width=500, placeholder=" …")
