"""Case C21: which two vocabularies are one."""

from __future__ import annotations

import pytest

from deployments.engines.vocabulary import VocabularyMismatch, compare_vocabularies

TOKENS = tuple(f"t{i}".encode() for i in range(50))


def test_padding_may_differ_in_number() -> None:
    """151,936 rows against 152,064, of which 151,665 are tokens, in small."""
    compare_vocabularies((*TOKENS, None, None), (*TOKENS, None))
    compare_vocabularies(TOKENS, (*TOKENS, *[None] * 128))


@pytest.mark.parametrize(
    ("draft", "first"),
    [
        ((b"x", *TOKENS[1:]), 0),
        ((*TOKENS[:7], b"x", b"y", *TOKENS[9:]), 7),
        ((*TOKENS, b"added"), 50),  # the draft could write what the target has no token for
        (TOKENS[:49], 49),  # the draft could not read one of the target's tokens
        ((*TOKENS[:20], None, *TOKENS[21:]), 20),
    ],
)
def test_a_real_difference_is_refused_naming_the_first_id(
    draft: tuple[bytes | None, ...], first: int
) -> None:
    with pytest.raises(VocabularyMismatch, match=rf"\b{first}\b"):
        compare_vocabularies(draft, TOKENS)
