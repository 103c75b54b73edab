"""`outrider trace record`: a trace of a real pair over both splits of the data sets."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from deployments.engines.llama_context import LlamaContext
from deployments.engines.protocol import Tokenizer
from deployments.engines.tokenizer import LlamaTokenizer, vocab_gguf
from deployments.engines.vocabulary import compare_vocabularies
from deployments.recorder import CHUNK, Prompt, record
from policies.traces import ROLLOUT_LEN, ModelFile, PromptTrace, Trace, write
from serve_app import weights
from serve_app.bench.prompts import SPLITS, spaced_prompts

WIDTH = 8  # prompts side by side
DATASETS = ("humaneval", "gsm8k")


def run(
    out: Path,
    *,
    draft: str,
    target: str,
    limit: int,
    max_tokens: int,
    threads: int,
    data: Path | None,
) -> Trace:
    """Record `limit` prompts of each split of each data set, and write them to `out`.

    `draft` and `target` are names of the catalogue or .gguf files. Raises VocabularyMismatch,
    EngineError, WeightsError and DatasetError.
    """
    paths = [weights.resolve(name) for name in (draft, target)]
    tokenizer = LlamaTokenizer(vocab_gguf(paths[1]))
    prompts = _prompts(tokenizer, limit, data)
    room = max(len(prompt.ids) for prompt in prompts) + max_tokens + ROLLOUT_LEN
    models = [
        LlamaContext(
            path,
            context=-(-room // 256) * 256,  # what llama.cpp would round it up to
            slots=WIDTH,
            threads=threads,
            batch_tokens=WIDTH * CHUNK,
        )
        for path in paths
    ]
    try:
        compare_vocabularies(models[0].vocabulary, models[1].vocabulary)
        recorded = record(models[0], models[1], prompts, max_tokens=max_tokens, width=WIDTH)
        done = tuple(_watched(recorded, len(prompts), time.monotonic))
        end_ids = models[1].end_ids
    finally:
        for model in models:
            model.free()
    files = [_model_file(*named) for named in zip((draft, target), paths, strict=True)]
    trace = Trace(files[0], files[1], max_tokens, end_ids, done)
    write(trace, out)
    return trace


def _prompts(tokenizer: Tokenizer, limit: int, data: Path | None) -> list[Prompt]:
    prompts = []
    for split, datasets in SPLITS.items():
        for name in DATASETS:
            dataset = datasets[name]
            for index, text in spaced_prompts(dataset, limit, data):
                message = {"role": "user", "content": text}
                ids = tokenizer.encode_chat([message]) if dataset.chat else tokenizer.encode(text)
                prompts.append(Prompt(name, split, index, tuple(ids)))
    return prompts


def _watched(
    recorded: Iterable[PromptTrace], count: int, now_s: Callable[[], float]
) -> Iterable[PromptTrace]:
    began_s, tokens = now_s(), 0
    for number, prompt in enumerate(recorded, 1):
        tokens += prompt.target_ids.size
        agreed = 1.0 - prompt.mismatches.size / prompt.target_ids.size
        print(
            f"{number}/{count} {prompt.dataset} {prompt.split} {prompt.index}: "
            f"{prompt.target_ids.size} tokens, {agreed:.0%} the draft's first choice, "
            f"{tokens} tokens in {now_s() - began_s:.0f} s",
            file=sys.stderr,
        )
        yield prompt


def _model_file(name: str, path: Path) -> ModelFile:
    with path.open("rb") as file:
        return ModelFile(Path(name).name, hashlib.file_digest(file, "sha256").hexdigest())
