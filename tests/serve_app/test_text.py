"""Text from ids: nothing split, nothing lost, stop strings found wherever they lie."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deployments.engines.scripted import ByteTokenizer
from serve_app.text import TextStream


def pieces(data: bytes, stop: list[str] | None = None) -> tuple[list[str], TextStream]:
    stream = TextStream(ByteTokenizer(), stop or [])
    return [stream.push(byte) for byte in data] + [stream.finish()], stream


@given(st.text())
def test_text_is_never_split_inside_a_character(text: str) -> None:
    assert "".join(pieces(text.encode())[0]) == text


@given(st.binary())
def test_bytes_that_are_no_text_become_replacement_characters(data: bytes) -> None:
    assert "".join(pieces(data)[0]) == data.decode(errors="replace")


@given(st.text("abc", max_size=40), st.lists(st.text("abc", min_size=1, max_size=4), max_size=4))
def test_text_ends_before_the_stop_string_that_is_complete_first(
    text: str, stop: list[str]
) -> None:
    """Oracle: the shortest prefix that contains a stop string, cut where the earliest begins."""
    expected = text
    for end in range(len(text) + 1):
        found = [at for s in stop if (at := text[:end].find(s)) >= 0]
        if found:
            expected = text[: min(found)]
            break
    got, stream = pieces(text.encode(), stop)
    assert "".join(got) == expected
    assert stream.stopped == (expected != text or any(text.find(s) == len(text) for s in stop))


def test_text_that_only_begins_like_a_stop_string_is_delivered() -> None:
    assert "".join(pieces(b"one th", [" three"])[0]) == "one th"


def test_what_cannot_become_a_stop_string_is_not_held_back() -> None:
    stream = TextStream(ByteTokenizer(), ["xyz"])
    assert [stream.push(byte) for byte in b"axyb"] == ["a", "", "", "xyb"]


@given(
    st.text("ab", max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 8),
)
def test_a_stop_string_counts_if_it_ends_past_min_tokens_wherever_it_begins(
    text: str, stop: list[str], min_tokens: int
) -> None:
    """Oracle, one byte a token: the first end past `min_tokens`, and its earliest beginning."""
    expected = text
    for end in range(min_tokens + 1, len(text) + 1):
        found = [end - len(s) for s in stop if text[:end].endswith(s)]
        if found:
            expected = text[: min(found)]
            break
    stream = TextStream(ByteTokenizer(), stop, min_tokens=min_tokens)
    got = "".join([stream.push(byte) for byte in text.encode()] + [stream.finish()])
    assert got == expected
