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
from worldkv.models.checkpoints.words import one_line

TOKENIZER_FOLDERS = ("", "tokenizer", "google/umt5-xxl")  # where, inside a checkpoint folder, they are looked for
_FILES = ("tokenizer.json", "spiece.model")
TOKENIZER_FILES = (*_FILES, "tokenizer_config.json", "special_tokens_map.json")
TOKENIZER_REPOSITORY = "google/umt5-xxl"  # on the hub: Wan's tokenizer, and so DreamZero's
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
    candidates = [Path(folder) / name for name in TOKENIZER_FOLDERS]
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
                self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                    str(folder), local_files_only=True, trust_remote_code=False
                )
            num_tokens = len(self._tokenizer)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # whatever a broken file makes of itself inside transformers; Rust's panics too
            raise self._unusable(folder, "cannot be loaded", error) from error
        if num_tokens > vocab_size:
            raise CheckpointError(
                f"the tokenizer in {folder} has {num_tokens} tokens, the text encoder only {vocab_size}"
            )
        self.text_len = text_len
        self._lock = threading.Lock()  # padding is a setting of the tokenizer, not an argument to it
        self._try(folder, vocab_size)

    def _try(self, folder: Path, vocab_size: int) -> None:
        """A file may be loaded and still be useless: one prompt is cut before a robot sends any."""
        try:
            ids, mask = self.encode("put the cup on the plate")
        except (KeyboardInterrupt, SystemExit, CheckpointError):
            raise
        except BaseException as error:
            raise self._unusable(folder, "cannot cut a prompt into tokens", error) from error
        if ids.shape != (1, self.text_len) or mask.shape != ids.shape or not mask.any():
            raise CheckpointError(f"the tokenizer in {folder} makes {list(ids.shape)} of a prompt, or nothing of it")
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise CheckpointError(
                f"the tokenizer in {folder} makes tokens {int(ids.min())} to {int(ids.max())}, the text encoder knows "
                f"0 to {vocab_size - 1}"
            )

    @staticmethod
    def _unusable(folder: Path, what: str, error: BaseException) -> CheckpointError:
        return CheckpointError(f"the tokenizer in {folder} {what}: {one_line(error) or type(error).__name__}")

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
