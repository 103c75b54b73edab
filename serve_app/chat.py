"""The terminal chat: answers as they come, every token marked by its origin.

The answer goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from serve_app.client import Chunk, Endpoint, EndpointError, Message, Report, Settings, printable

# weight and underline tell them apart where colours do not
STYLES = {
    "accepted": Style(color="green"),
    "recovered": Style(color="magenta", underline=True),
    "bonus": Style(color="cyan", bold=True),
}
LEGEND = Text.assemble(
    ("accepted", STYLES["accepted"]),
    " draft tokens · ",
    ("recovered", STYLES["recovered"]),
    ": the target's at a rejected draft token · ",
    ("bonus", STYLES["bonus"]),
    ": the target's after accepted draft tokens, or decoded alone",
)
HELP = "/reset starts anew, /exit or Ctrl-D ends, Ctrl-C stops an answer"


@dataclass(frozen=True, slots=True)
class Reply:
    """What was written; `finished` is false if the user stopped it."""

    text: str
    finished: bool


def run(endpoint: Endpoint, message: str | None, system: str | None, settings: Settings) -> None:
    """One answer to the message, or a conversation with whoever types.

    Without a terminal, and with $NO_COLOR, nothing but text is written. Raises EndpointError, and
    KeyboardInterrupt if the only answer was stopped.
    """
    # by itself, rich would still write bold and underlined text under NO_COLOR
    color_system: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    out = Console(color_system=color_system)
    err = Console(color_system=color_system, stderr=True)
    opening = [] if system is None else [_message("system", system)]
    if message is None:
        err.print(Text(printable(f"{endpoint.model} at {endpoint.url}; {HELP}")))
    err.print(LEGEND, soft_wrap=True)
    if message is None:
        with suppress(ImportError):
            import readline  # noqa: F401  gives `input` its line editing

        converse(endpoint, opening, settings, out, err, lambda: input("> "))
        return
    question = _message("user", message)
    if not answer(endpoint, [*opening, question], settings, out, err).finished:
        raise KeyboardInterrupt


def converse(
    endpoint: Endpoint,
    opening: Sequence[Message],
    settings: Settings,
    out: Console,
    err: Console,
    read_line: Callable[[], str],
) -> None:
    """Answer line after line, each with all before it, until /exit or the end of the input.

    A stopped answer stays in the conversation as far as it came. A request that fails is told,
    and its question forgotten.
    """
    messages = list(opening)
    for line in _lines(read_line, err):
        if line == "/reset":
            messages = list(opening)
            continue
        question = _message("user", line)
        try:
            answered = answer(endpoint, [*messages, question], settings, out, err)
        except EndpointError as error:
            err.print(Text(f"outrider: {error}"), soft_wrap=True)
            continue
        if answered.text:
            messages += [question, {"role": "assistant", "content": answered.text}]


def answer(
    endpoint: Endpoint,
    messages: Sequence[Message],
    settings: Settings,
    out: Console,
    err: Console,
) -> Reply:
    """Write one answer as it comes, and its summary; Ctrl-C ends it. Raises EndpointError."""
    texts: list[str] = []
    num_tokens, report = 0, None
    try:
        with closing(endpoint.chat(messages, settings)) as chunks:
            for chunk in chunks:
                texts.append(chunk.text)
                num_tokens += len(chunk.tokens)
                report = chunk.report
                out.print(Segments(_segments(chunk)), end="", crop=False)
    except KeyboardInterrupt:
        report = None
    finally:
        text = "".join(texts)
        if text and not text.endswith("\n"):
            out.print()
    err.print(Text(summary(num_tokens, report), style="dim"), soft_wrap=True)
    return Reply(text, finished=report is not None)


def summary(num_tokens: int, report: Report | None) -> str:
    """One line about an answer; without a report it was stopped."""
    if report is None:
        return f"stopped after {num_tokens} tokens"
    facts = [f"{num_tokens} tokens"]
    if report.acceptance_rate is not None:
        share = f"{report.accepted} of {report.drafted} draft tokens"
        facts.append(f"{share} accepted ({report.acceptance_rate:.0%})")
    if report.acceptance_len is not None:
        facts.append(f"NAVs: {report.navs}, tokens per NAV: {report.acceptance_len:.2f}")
    if report.tpt_ms is not None:
        facts.append(f"{report.tpt_ms:.1f} ms per token")
    return " · ".join([*facts, f"mode: {report.mode}"])


def _message(role: str, text: str) -> Message:
    # bytes of the terminal that are no UTF-8 come as lone surrogates, which no JSON can hold
    return {"role": role, "content": text.encode(errors="replace").decode()}


def _segments(chunk: Chunk) -> list[Segment]:
    told = 0
    segments = []
    for token in chunk.tokens:
        told += len(token.text)
        segments.append(Segment(printable(token.text), STYLES[token.origin]))
    return [*segments, Segment(printable(chunk.text[told:]))]


def _lines(read_line: Callable[[], str], err: Console) -> Iterator[str]:
    """What is typed, without empty lines; Ctrl-C drops a line."""
    while True:
        try:
            line = read_line().strip()
        except KeyboardInterrupt:
            err.print()
            continue
        except EOFError:
            err.print()
            return
        if line == "/exit":
            return
        if line:
            yield line
