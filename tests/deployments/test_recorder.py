"""Recording a pair: held against two toy models that see exactly the ids that were fed."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from deployments.engines.llama_context import LlamaContext, Row
from deployments.engines.tokenizer import LlamaTokenizer, vocab_gguf
from deployments.recorder import CHUNK, Prompt, record
from policies.traces import ROLLOUT_LEN, TOP

VOCAB, END = 40, 3


class ToyContext:
    """Implements LlamaContext: logits of a function of all ids held, and a KV that checks order."""

    def __init__(self, salt: int, sequences: int, shared: float) -> None:
        self._salt, self._shared = salt, shared
        self._held: list[list[int]] = [[] for _ in range(sequences)]
        self._logits: dict[int, np.ndarray] = {}
        self.end_ids = frozenset({END})
        self.widest = 0

    def forward(self, rows: Sequence[Row]) -> None:
        self.widest = max(self.widest, len(rows))
        self._logits = {}
        for number, row in enumerate(rows):
            held = self._held[row.sequence]
            assert row.position == len(held), "a position is fed without those before it"
            held.append(row.token_id)
            if row.wants_logits:
                self._logits[number] = self.view(held)

    def view(self, ids: Sequence[int]) -> np.ndarray:
        """Two models agree on most prefixes, since one of their parts is the same."""
        crc = zlib.crc32(bytes(ids))
        common = np.random.default_rng(crc).normal(size=VOCAB)
        own = np.random.default_rng(crc ^ self._salt).normal(size=VOCAB)
        return (3.0 * (common + self._shared * own)).astype(np.float32)

    def logits(self, row: int) -> np.ndarray:
        return self._logits[row]

    def remove(self, sequence: int, start: int) -> bool:
        del self._held[sequence][start:]
        return True

    def clear(self, sequence: int) -> None:
        self._held[sequence].clear()


def probabilities(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


@pytest.mark.parametrize("width", [1, 3])
def test_a_trace_is_what_each_model_would_say_alone(width: int) -> None:
    draft, target = (ToyContext(salt, width, shared=0.3) for salt in (11, 22))
    prompts = [
        Prompt("toy", "tune", index, tuple(1 + (index * 7 + i) % 30 for i in range(length)))
        for index, length in enumerate((1, 5, CHUNK, 2 * CHUNK + 3, CHUNK + 1))
    ]
    traces = list(record(draft, target, prompts, max_tokens=20, width=width))  # type: ignore[arg-type]
    assert [trace.index for trace in traces] == [0, 1, 2, 3, 4]
    mismatches = 0
    for prompt, trace in zip(prompts, traces, strict=True):
        ids, missed = list(prompt.ids), iter(trace.rollouts)
        for at, token_id in enumerate(trace.target_ids.tolist()):
            assert token_id == int(target.view(ids).argmax())
            sure = probabilities(draft.view(ids))
            likeliest = np.argsort(-sure)[:TOP]
            assert trace.draft_ids[at].tolist() == likeliest.tolist()
            assert trace.confidences[at] == pytest.approx(sure.max(), rel=1e-5)
            entropy = -float((sure * np.log(sure)).sum())
            assert trace.entropies[at] == pytest.approx(entropy, rel=1e-4)
            if likeliest[0] != token_id:
                mismatches += 1
                own = [*ids, int(likeliest[0])]
                for confidence, _ in next(missed):
                    sure = probabilities(draft.view(own))
                    assert confidence == pytest.approx(sure.max(), rel=1e-5)
                    own.append(int(sure.argmax()))
            ids.append(token_id)
        assert len(trace.target_ids) == 20 or trace.target_ids[-1] == END
    assert mismatches > 5
    assert target.widest <= width * CHUNK


def test_a_model_drafts_for_itself_without_a_mistake(small_path: Path) -> None:
    """The real engine: the same model as draft and target, three prompts side by side."""
    models = [
        LlamaContext(small_path, context=256, slots=3, threads=2, batch_tokens=3 * CHUNK)
        for _ in range(2)
    ]
    tokenizer = LlamaTokenizer(vocab_gguf(small_path))
    texts = ("One, two, three, four,", "1 2 3 4 5 6 7 8", "A, B, C, D, E,")
    prompts = [
        Prompt("toy", "evaluate", i, tuple(tokenizer.encode(text))) for i, text in enumerate(texts)
    ]
    try:
        traces = list(record(models[0], models[1], prompts, max_tokens=24, width=3))
    finally:
        for model in models:
            model.free()
    tokens = sum(trace.target_ids.size for trace in traces)
    agreed = tokens - sum(trace.mismatches.size for trace in traces)
    assert agreed >= 0.95 * tokens  # kernels of other shapes may turn a near tie
    assert all(trace.rollouts.shape == (trace.mismatches.size, ROLLOUT_LEN, 2) for trace in traces)
