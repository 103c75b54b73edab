"""llama.cpp behind Python values: one loaded model with a KV cache for several sequences.

Every call blocks, and the calls of one context are made one at a time. Knows no sessions, no
sampling and no event loop.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp

from deployments.engines.protocol import EngineError, Vocabulary

logger = logging.getLogger("outrider.llama_cpp")

Logits = npt.NDArray[np.float32]

GGML_LOG_LEVEL_ERROR = 4
BROKEN_OFF = 2  # status of llama_decode
GO_ON, BREAK_OFF = b"0", b"1"
# llama.cpp asks at every node of the graph. C's own reading of the flag needs no interpreter, so
# that a forward never waits for what Python threads do.
_is_set = ctypes.cast(ctypes.CDLL(None).atoi, llama_cpp.ggml_abort_callback)
_running = threading.local()  # `flag`: of the forward of this thread


def _log(level: int, text: bytes, _: object) -> None:
    # a load writes some hundred lines, and warns of vocabulary quirks that are known
    flag = getattr(_running, "flag", None)
    failed = level == GGML_LOG_LEVEL_ERROR and (flag is None or flag.value != BREAK_OFF)
    severity = logging.ERROR if failed else logging.DEBUG
    logger.log(severity, "%s", text.decode(errors="replace").rstrip())


LOG_CALLBACK = llama_cpp.llama_log_callback(_log)  # llama.cpp keeps no reference to it


@dataclass(frozen=True, slots=True)
class Row:
    """One token of a forward."""

    token_id: int
    position: int
    sequence: int
    wants_logits: bool


class LlamaContext:
    """A model and its KV cache: at least `context` positions for each of its `slots`.

    Raises EngineError if the model cannot be loaded so.
    """

    def __init__(
        self, path: Path, *, context: int, slots: int, threads: int, batch_tokens: int
    ) -> None:
        self._model = load_model(path, vocab_only=False)
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.vocabulary = _vocabulary(vocab)
        self.end_ids = frozenset(
            i for i in range(len(self.vocabulary)) if llama_cpp.llama_vocab_is_eog(vocab, i)
        )
        real = np.array([token is not None for token in self.vocabulary])
        self._num_logits = int(real.nonzero()[0][-1]) + 1
        self._padding = (~real[: self._num_logits]).nonzero()[0]
        trained = llama_cpp.llama_model_n_ctx_train(self._model)
        if context > trained:
            llama_cpp.llama_model_free(self._model)
            raise EngineError(f"{path} was trained for {trained} ids of context, not {context}")
        self._context = _new_context(self._model, context, slots, threads, batch_tokens)
        if not self._context:
            llama_cpp.llama_model_free(self._model)
            raise EngineError(f"llama.cpp cannot hold {slots} sessions of {context} ids of {path}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._flag = ctypes.create_string_buffer(GO_ON)
        llama_cpp.llama_set_abort_callback(
            self._context, _is_set, ctypes.cast(self._flag, ctypes.c_void_p)
        )
        self._batch = llama_cpp.llama_batch_init(batch_tokens, 0, 1)

    def forward(self, rows: Sequence[Row]) -> None:
        """Run the rows and keep their KV. If it raises EngineError, some may have been kept."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, row in enumerate(rows):
            batch.token[i] = row.token_id
            batch.pos[i] = row.position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = row.sequence
            batch.logits[i] = row.wants_logits
        _running.flag = self._flag
        status = llama_cpp.llama_decode(self._context, batch)
        if status == BROKEN_OFF:
            raise EngineError(f"a forward of {len(rows)} tokens was broken off")
        if status != 0:
            raise EngineError(f"llama_decode of {len(rows)} tokens failed with status {status}")

    def break_off(self) -> None:
        """Have the forward under way raise EngineError at once, and any other until `resume`.

        To be called from another thread. On a CPU; elsewhere a forward goes on to its end.
        """
        self._flag.value = BREAK_OFF

    def resume(self) -> None:
        """Let forwards run again."""
        self._flag.value = GO_ON

    def logits(self, row: int) -> Logits:
        """The logits after that row of the last forward, -inf for padding ids; [last real id + 1].

        Valid until the next forward.
        """
        pointer = llama_cpp.llama_get_logits_ith(self._context, row)
        values = np.ctypeslib.as_array(pointer, shape=(self._num_logits,))
        values[self._padding] = -np.inf
        return values

    def remove(self, sequence: int, start: int) -> bool:
        """Drop a sequence's KV from a position on; False if the memory cannot do that."""
        return bool(llama_cpp.llama_memory_seq_rm(self._memory, sequence, start, -1))

    def clear(self, sequence: int) -> None:
        """Drop all of a sequence's KV; this never fails."""
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def free(self) -> None:
        """Give the memory back; no other call may follow."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)


def load_vocabulary(path: Path) -> Vocabulary:
    """The vocabulary of a model, without its weights. Raises EngineError."""
    model = load_model(path, vocab_only=True)
    vocabulary = _vocabulary(llama_cpp.llama_model_get_vocab(model))
    llama_cpp.llama_model_free(model)
    return vocabulary


def load_model(path: Path, *, vocab_only: bool) -> llama_cpp.llama_model_p:
    """A model, which the caller frees. Raises EngineError."""
    if not path.is_file():
        raise EngineError(f"there is no model file {path}")
    llama_cpp.llama_log_set(LOG_CALLBACK, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = vocab_only
    params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP
    model = llama_cpp.llama_model_load_from_file(bytes(path), params)
    if not model:
        raise EngineError(f"llama.cpp cannot load {path}; it has logged why")
    return model


def _new_context(
    model: llama_cpp.llama_model_p, context: int, slots: int, threads: int, tokens: int
) -> llama_cpp.llama_context_p:
    params = llama_cpp.llama_context_default_params()
    # separate KV streams: attention reads a sequence's own cells only, so its logits do not depend
    # on what its neighbours hold, and no session can eat another's room
    params.kv_unified = False
    if not llama_cpp.llama_supports_gpu_offload():
        # on a CPU, flash attention halves the speed of prefill and verification at length
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.n_ctx = context * slots
    params.n_seq_max = slots
    params.n_batch = params.n_ubatch = tokens
    params.n_threads = params.n_threads_batch = threads
    return llama_cpp.llama_init_from_model(model, params)


def _vocabulary(vocab: llama_cpp.llama_vocab_p) -> Vocabulary:
    def token(i: int) -> bytes | None:
        if llama_cpp.llama_vocab_get_attr(vocab, i) & llama_cpp.LLAMA_TOKEN_ATTR_UNUSED:
            return None
        text: bytes = llama_cpp.llama_vocab_get_text(vocab, i)
        return text

    return tuple(token(i) for i in range(llama_cpp.llama_vocab_n_tokens(vocab)))
