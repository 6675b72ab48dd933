"""Prompt text to token ids, cleaned as the reference cleans it.

A checkpoint's own tokenizer where its folder carries one, read from the folder only. Otherwise a byte-level stand-in
that keeps a model runnable: its ids mean nothing to a trained text encoder, and it says so once. Knows no prompt
templates: the caller words the prompt.
"""

from __future__ import annotations

import hashlib
import html
import importlib
import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from worldkv.errors import CheckpointError

_FOLDERS = ("", "tokenizer", "google/umt5-xxl")  # where, inside a checkpoint folder, tokenizers are looked for
_FILES = ("tokenizer.json", "spiece.model")
_PAD, _END, _FIRST_BYTE = 0, 1, 3  # ids of the byte-level tokenizer; 2 is unused, as in ByT5
_DIGEST_BYTES = 8

Tokens = tuple[np.ndarray, np.ndarray]  # token ids and attention mask, int64 [1, text_len]


class Tokenizer(Protocol):
    """Prompts to token ids; safe to call from several threads."""

    def encode(self, text: str) -> Tokens:
        """Of the cleaned text, padded or cut to length."""
        ...


def clean_prompt(text: str) -> str:
    """Mojibake repaired, HTML entities resolved twice over, runs of white space made one blank, ends stripped."""
    try:
        ftfy = importlib.import_module("ftfy")
    except ImportError as error:
        raise CheckpointError("cleaning prompts needs ftfy: pip install 'worldkv[dreamzero]'") from error
    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return re.sub(r"\s+", " ", text).strip()


def find_tokenizer(folder: str | Path) -> Path | None:
    """Where in a checkpoint folder the tokenizer's files lie."""
    candidates = [Path(folder) / name for name in _FOLDERS]
    return next((path for path in candidates if any((path / file).is_file() for file in _FILES)), None)


def load_tokenizer(
    folder: str | Path, text_len: int, vocab_size: int, warn: Callable[[str], None] = warnings.warn
) -> Tokenizer:
    """The tokenizer in `folder`, its tokenizer/ or its google/umt5-xxl/; else the byte-level one.

    `warn` is called once where the folder has none. `vocab_size`: of the text encoder. Raises CheckpointError if a
    tokenizer is there and cannot be used.
    """
    found = find_tokenizer(folder)
    if found is not None:
        return HFTokenizer(found, text_len, vocab_size)
    warn(
        f"{folder} has no tokenizer ({' or '.join(_FILES)}): prompts are cut into bytes, which is not this "
        "model's own tokenisation. Put google/umt5-xxl's tokenizer files there unless the weights are random."
    )
    return ByteTokenizer(text_len, vocab_size)


class HFTokenizer:
    """A tokenizer of transformers, read from a local folder."""

    def __init__(self, folder: Path, text_len: int, vocab_size: int) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                transformers = importlib.import_module("transformers")
                self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # whatever a broken file makes of itself inside transformers
            raise CheckpointError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
        if len(self._tokenizer) > vocab_size:
            raise CheckpointError(
                f"the tokenizer in {folder} has {len(self._tokenizer)} tokens, the text encoder only {vocab_size}"
            )
        self.text_len = text_len
        self._lock = threading.Lock()  # padding is a setting of the tokenizer, not an argument to it

    def encode(self, text: str) -> Tokens:
        with self._lock:
            out = self._tokenizer(
                [clean_prompt(text)],
                padding="max_length",
                truncation=True,
                max_length=self.text_len,
                add_special_tokens=True,
                return_tensors="np",
            )
        return out["input_ids"].astype(np.int64), out["attention_mask"].astype(np.int64)


class ByteTokenizer:
    """UTF-8 bytes as ids 3 to 258, then an end id.

    Of a text that is too long it keeps the beginning and eight bytes of a digest of the whole, so that different
    prompts never look the same.
    """

    def __init__(self, text_len: int, vocab_size: int) -> None:
        if vocab_size < _FIRST_BYTE + 256 or text_len < _DIGEST_BYTES + 1:
            raise CheckpointError(
                f"without a tokenizer the text encoder needs a vocabulary of at least {_FIRST_BYTE + 256} "
                f"(has {vocab_size}) and a text_len of at least {_DIGEST_BYTES + 1} (has {text_len})"
            )
        self.text_len = text_len

    def encode(self, text: str) -> Tokens:
        data, room = clean_prompt(text).encode("utf-8"), self.text_len - 1
        if len(data) > room:
            data = data[: room - _DIGEST_BYTES] + hashlib.sha256(data).digest()[:_DIGEST_BYTES]
        ids = np.full((1, self.text_len), _PAD, dtype=np.int64)
        ids[0, : len(data)] = np.frombuffer(data, dtype=np.uint8).astype(np.int64) + _FIRST_BYTE
        ids[0, len(data)] = _END
        return ids, (np.arange(self.text_len) <= len(data)).astype(np.int64)[None]
