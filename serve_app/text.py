"""From committed ids to text: UTF-8 never split, stop strings found wherever they begin."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from deployments.engines.protocol import Tokenizer


class TextStream:
    """Turns ids into text one by one, holding back what may still become a stop string.

    The concatenation of all returned pieces is the same however the ids arrive. A byte sequence
    that is no UTF-8 becomes U+FFFD. A stop string counts if it ends past the first `min_tokens`
    ids, wherever it begins. After `stopped`, no more text comes.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, min_tokens: int = 0
    ) -> None:
        self.tokenizer = tokenizer
        self._too_early = min_tokens
        self._stop = [text.encode() for text in stop]
        self._held = b""
        self._num_early = 0  # of the held bytes, those of the first `min_tokens` ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that the token makes certain."""
        if self.stopped:
            return ""
        token_bytes = self.tokenizer.token_bytes(token_id)
        self._held += token_bytes
        if self._too_early:
            self._too_early -= 1
            self._num_early += len(token_bytes)
        found = [at for text in self._stop if (at := self._find(text)) >= 0]
        if found:
            self.stopped = True
            text = self._decoder.decode(self._held[: min(found)], final=True)
            self._held = b""
            return text
        certain = len(self._held) - self._longest_stop_prefix()
        ready, self._held = self._held[:certain], self._held[certain:]
        self._num_early = max(0, self._num_early - certain)
        return self._decoder.decode(ready)

    def finish(self) -> str:
        """The text still held back, at the end of a generation that no stop string ended."""
        held, self._held = self._held, b""
        return "" if self.stopped else self._decoder.decode(held, final=True)

    def _find(self, text: bytes) -> int:
        """Where a stop string begins that ends past the early tokens; -1: nowhere."""
        return self._held.find(text, max(0, self._num_early + 1 - len(text)))

    def _longest_stop_prefix(self) -> int:
        """How many of the last held bytes may be the beginning of a stop string."""
        longest = 0
        for text in self._stop:
            for length in range(min(len(text) - 1, len(self._held)), longest, -1):
                if self._held.endswith(text[:length]):
                    longest = length
                    break
        return longest
