"""Whether two models speak of the same tokens. Knows no engine: it compares token strings."""

from __future__ import annotations

from itertools import zip_longest

from deployments.engines.protocol import Vocabulary


class VocabularyMismatch(ValueError):
    """Draft and target give one id to different tokens, so drafts would mean something else."""


def compare_vocabularies(draft: Vocabulary, target: Vocabulary) -> None:
    """Return if every id that is a real token on either side is the same string on both.

    Padding rows (None) and rows beyond the shorter vocabulary are no tokens and may differ in
    number. Raises VocabularyMismatch naming the first id that differs.
    """
    if draft == target:
        return
    for token_id, (ours, theirs) in enumerate(zip_longest(draft, target)):
        if ours != theirs:
            raise VocabularyMismatch(
                f"draft and target vocabularies differ at id {token_id}: "
                f"{_shown(ours)} in the draft model, {_shown(theirs)} in the target; "
                "a draft model must share the target's tokenizer"
            )


def _shown(token: bytes | None) -> str:
    return "no token" if token is None else repr(token.decode(errors="replace"))
