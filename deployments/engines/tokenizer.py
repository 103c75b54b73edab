"""The target's tokenizer without the target: llama.cpp's, from the vocabulary part of a GGUF."""

from __future__ import annotations

import ctypes
import re
import struct
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from llama_cpp import llama_cpp

from deployments.engines.chat_template import ChatTemplate
from deployments.engines.llama_context import load_model
from deployments.engines.protocol import ChatTemplateError

GGUF_MAGIC = b"GGUF"
GGUF_STRING, GGUF_ARRAY = 8, 9
# bytes of the GGUF value types that have a fixed size
GGUF_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

# what llama.cpp takes for a token only where special tokens are to be recognised
CONTROL_ATTRIBUTES = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN


def vocab_gguf(path: Path) -> bytes:
    """The file's metadata (tokenizer and chat template with it) as a GGUF of no tensors.

    Raises ValueError if the file is not a GGUF.
    """
    with path.open("rb") as file:
        magic, version, _, num_values = struct.unpack("<4sIQQ", file.read(24).ljust(24, b"\0"))
        if magic != GGUF_MAGIC:
            raise ValueError(f"{path} is not a GGUF file")
        start = file.tell()
        try:
            for _ in range(num_values):
                _skip_value(file, GGUF_STRING)
                _skip_value(file, *_read(file, "<I"))
        except (struct.error, KeyError) as error:
            raise ValueError(f"{path} is not a whole GGUF file") from error
        num_bytes = file.tell() - start
        file.seek(start)
        return struct.pack("<4sIQQ", magic, version, 0, num_values) + file.read(num_bytes)


def _read(file: BinaryIO, layout: str) -> tuple[int, ...]:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def _skip_value(file: BinaryIO, kind: int) -> None:
    if kind == GGUF_STRING:
        (num_bytes,) = _read(file, "<Q")
        file.seek(num_bytes, 1)
    elif kind == GGUF_ARRAY:
        kind, count = _read(file, "<IQ")
        if kind in GGUF_SIZES:
            file.seek(GGUF_SIZES[kind] * count, 1)
        else:
            for _ in range(count):
                _skip_value(file, kind)
    else:
        file.seek(GGUF_SIZES[kind], 1)


class LlamaTokenizer:
    """Tokenizer of the model whose `vocab_gguf` this is. Its ids are llama.cpp's for the model."""

    def __init__(self, vocab: bytes) -> None:
        with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
            file.write(vocab)
            file.flush()
            model = load_model(Path(file.name), vocab_only=True)
        weakref.finalize(self, llama_cpp.llama_model_free, model)
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self._num_tokens = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self._control = {self._text(i): i for i in range(self._num_tokens) if self._is_control(i)}
        # the longest first, as llama.cpp does; without any control token nothing matches
        strings = sorted(filter(None, self._control), key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, strings)) or "(?!)")
        source = llama_cpp.llama_model_chat_template(model, None)
        self._template = None if source is None else self._chat_template(source.decode())

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, by the model's BOS rule. Raises ValueError on lone surrogates."""
        return self._tokenize(text, add_special=True)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of the rendered chat template; text that spells a control token counts as text,
        unless the template itself wrote it."""
        if self._template is None:
            raise ChatTemplateError("the model's file has no chat template")
        ids: list[int] = []
        plain = ""  # text since the last control token: tokens may span template and content
        for span in self._template.spans(messages):
            if not span.from_template:
                plain += span.text
                continue
            at = 0
            for match in self._control_pattern.finditer(span.text):
                ids += self._tokenize(plain + span.text[at : match.start()])
                ids.append(self._control[match[0]])
                plain, at = "", match.end()
            plain += span.text[at:]
        return ids + self._tokenize(plain)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to the text; empty for control tokens and padding."""
        if not 0 <= token_id < self._num_tokens:
            raise ValueError(f"id {token_id} is not in the vocabulary of {self._num_tokens}")
        buffer = ctypes.create_string_buffer(64)
        length = self._piece(token_id, buffer)
        if length < 0:
            buffer = ctypes.create_string_buffer(-length)
            length = self._piece(token_id, buffer)
        return buffer.raw[:length]

    def _piece(self, token_id: int, buffer: ctypes.Array[ctypes.c_char]) -> int:
        size = len(buffer)
        return int(llama_cpp.llama_token_to_piece(self._vocab, token_id, buffer, size, 0, False))

    def _tokenize(self, text: str, add_special: bool = False) -> list[int]:
        data = text.encode()
        room = len(data) + 8  # no token is empty; BOS, EOS and a leading space may be added
        ids = (llama_cpp.llama_token * room)()
        # the length is given, so that a NUL does not end the text
        count = llama_cpp.llama_tokenize(
            self._vocab, data, len(data), ids, room, add_special, False
        )
        if count < 0:
            raise ValueError(f"llama.cpp cannot tokenize a text of {len(data)} bytes")
        return list(ids[:count])

    def _is_control(self, token_id: int) -> bool:
        return bool(llama_cpp.llama_vocab_get_attr(self._vocab, token_id) & CONTROL_ATTRIBUTES)

    def _text(self, token_id: int) -> str:
        if token_id < 0:  # llama.cpp's null token: the model has none of the kind
            return ""
        text: bytes = llama_cpp.llama_vocab_get_text(self._vocab, token_id)
        return text.decode(errors="replace")

    def _chat_template(self, source: str) -> ChatTemplate:
        bos = self._text(llama_cpp.llama_vocab_bos(self._vocab))
        eos = self._text(llama_cpp.llama_vocab_eos(self._vocab))
        return ChatTemplate(source, self._control_pattern, bos, eos)
