"""The terminal chat against a fake endpoint: what reaches which stream, and in which dress."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from rich.console import Console

from serve_app.chat import Reply, answer, converse, summary
from serve_app.client import Report, Settings, connect
from tests.serve_app.fake_endpoint import URL, FakeEndpoint, error, install, report, stream_of

QUESTION = [{"role": "user", "content": "hello"}]
SETTINGS = Settings("speculative")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeEndpoint:
    fake = FakeEndpoint()
    install(fake, monkeypatch)
    return fake


def console(*, terminal: bool = False) -> Console:
    system = "standard" if terminal else None
    return Console(
        file=io.StringIO(), force_terminal=terminal, color_system=system, width=40, no_color=False
    )


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def choice(*tokens: tuple[str, str], more: str = "") -> dict[str, Any]:
    """A choice with tokens of (text, origin), and text beyond theirs."""
    sent = [{"id": i, "text": text, "origin": origin} for i, (text, origin) in enumerate(tokens)]
    text = "".join(text for text, _ in tokens) + more
    return {"delta": {"content": text}, "outrider": {"tokens": sent}}


def told(fake: FakeEndpoint, *choices: dict[str, Any], terminal: bool = False) -> str:
    """What an answer of these choices writes."""
    fake.fail = lambda _body: stream_of(*choices, outrider=report())
    out = console(terminal=terminal)
    answer(connect(URL), QUESTION, SETTINGS, out, console())
    return written(out)


def typed(*lines: str | type[BaseException]) -> Callable[[], str]:
    """Reads these lines, then the end of the input."""
    left = iter(lines)

    def read_line() -> str:
        line = next(left, EOFError)
        if isinstance(line, str):
            return line
        raise line

    return read_line


def test_every_origin_has_its_own_colour_and_its_own_weight_or_line(fake: FakeEndpoint) -> None:
    tokens = (("a", "accepted"), ("r", "recovered"), ("b", "bonus"))
    dressed = "\x1b[32ma\x1b[0m\x1b[4;35mr\x1b[0m\x1b[1;36mb\x1b[0m\n"
    assert told(fake, choice(*tokens), terminal=True) == dressed


def test_without_a_terminal_the_answer_is_plain(fake: FakeEndpoint) -> None:
    assert told(fake, choice(("a", "accepted"), ("r", "recovered"))) == "ar\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_model_output_is_never_markup_nor_wrapped_nor_changed(
    fake: FakeEndpoint, terminal: bool
) -> None:
    text = "[red]x[/red] :smile: \tif x:\n\t\treturn  \n" + "long " * 40 + "\n"
    assert text in told(fake, choice(("", "bonus"), more=text), terminal=terminal)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("\x1b[2Jx", "[2Jx"),
        ("\x1b]0;title\x07x", "]0;titlex"),
        ("\x9b2Jx", "2Jx"),
        ("a\rb\bc\x7f\x00", "abc"),
        ("a\ud800b", "ab"),
        ("a\tb\nc", "a\tb\nc"),
    ],
)
def test_control_characters_of_the_model_do_not_reach_the_terminal(
    fake: FakeEndpoint, text: str, left: str
) -> None:
    assert told(fake, choice((text, "accepted"))) == left + "\n"
    assert told(fake, choice(more=text)) == left + "\n"


def test_text_beyond_that_of_the_tokens_is_written_too(fake: FakeEndpoint) -> None:
    assert told(fake, choice(("a", "bonus"), ("", "bonus")), choice(more="é")) == "aé\n"


def test_a_final_line_break_is_not_doubled(fake: FakeEndpoint) -> None:
    assert told(fake, choice(("a\n", "bonus"))) == "a\n"


@pytest.mark.parametrize(
    ("figures", "line"),
    [
        (
            {
                "drafted": 40,
                "accepted": 30,
                "acceptance_rate": 0.75,
                "navs": 12,
                "acceptance_len": 3.5,
                "tpt_ms": 105.04,
            },
            "42 tokens · 30 of 40 draft tokens accepted (75%) · "
            "NAVs: 12, tokens per NAV: 3.50 · 105.0 ms per token · mode: speculative",
        ),
        ({"mode": "off", "tpt_ms": 98.0}, "42 tokens · 98.0 ms per token · mode: off"),
        ({"mode": "degraded", "tpt_ms": None}, "42 tokens · mode: degraded"),
    ],
)
def test_the_summary_says_what_the_endpoint_reports(figures: dict[str, Any], line: str) -> None:
    assert summary(42, Report.model_validate(report(**figures))) == line


def test_the_summary_is_one_line_on_stderr_and_counts_tokens_not_chunks(
    fake: FakeEndpoint,
) -> None:
    out, err = console(), console()
    answer(connect(URL), QUESTION, Settings("speculative", max_tokens=7), out, err)
    assert written(err) == "7 tokens · 10.0 ms per token · mode: speculative\n"
    assert written(out).count("w") == 7


def test_a_conversation_sends_all_that_was_said(fake: FakeEndpoint) -> None:
    opening = [{"role": "system", "content": "be brief"}]
    out = console()
    converse(connect(URL), opening, SETTINGS, out, console(), typed("one", "", " two "))
    first = written(out).splitlines()[0]
    assert [body["messages"] for body in fake.requests] == [
        [*opening, {"role": "user", "content": "one"}],
        [
            *opening,
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": first},
            {"role": "user", "content": "two"},
        ],
    ]


def test_reset_forgets_all_but_the_system_message_and_exit_ends(fake: FakeEndpoint) -> None:
    opening = [{"role": "system", "content": "be brief"}]
    lines = typed("one", "/reset", "two", "/exit", "three")
    converse(connect(URL), opening, SETTINGS, console(), console(), lines)
    assert [body["messages"] for body in fake.requests] == [
        [*opening, {"role": "user", "content": text}] for text in ("one", "two")
    ]


def interrupted(*choices: dict[str, Any]) -> httpx.Response:
    def events() -> Iterator[bytes]:
        yield from stream_of(*choices).iter_raw()
        raise KeyboardInterrupt

    return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=events())


def test_a_stopped_answer_is_kept_as_far_as_it_came(fake: FakeEndpoint) -> None:
    responses = iter([interrupted(choice(("so", "bonus"), ("far", "accepted"))), None])
    fake.fail = lambda _body: next(responses)
    out, err = console(), console()
    converse(connect(URL), [], SETTINGS, out, err, typed("one", "two"))
    assert written(out).startswith("sofar\n")
    assert written(err).startswith("stopped after 2 tokens\n")
    assert fake.requests[1]["messages"][1] == {"role": "assistant", "content": "sofar"}


def test_an_answer_stopped_before_its_first_token_takes_its_question_along(
    fake: FakeEndpoint,
) -> None:
    responses = iter([interrupted(), None])
    fake.fail = lambda _body: next(responses)
    converse(connect(URL), [], SETTINGS, console(), console(), typed("one", "two"))
    assert fake.requests[1]["messages"] == [{"role": "user", "content": "two"}]


def test_a_stopped_answer_says_so(fake: FakeEndpoint) -> None:
    fake.fail = lambda _body: interrupted(choice(("a", "bonus")))
    stopped = answer(connect(URL), QUESTION, SETTINGS, console(), console())
    assert stopped == Reply("a", finished=False)


def test_ctrl_c_while_typing_drops_the_line_only(fake: FakeEndpoint) -> None:
    lines = typed(KeyboardInterrupt, "one")
    converse(connect(URL), [], SETTINGS, console(), console(), lines)
    assert len(fake.requests) == 1


def test_a_failed_request_is_told_and_its_question_forgotten(fake: FakeEndpoint) -> None:
    responses = iter([error(400, "too long\x1b[2J"), None])
    fake.fail = lambda _body: next(responses)
    err = console()
    converse(connect(URL), [], SETTINGS, console(), err, typed("one", "two"))
    assert written(err).startswith(f"outrider: {URL}: too long[2J\n")
    assert fake.requests[1]["messages"] == [{"role": "user", "content": "two"}]
