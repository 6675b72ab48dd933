"""Prompts to token ids: cleaning, the checkpoint's own tokenizer, the byte-level stand-in."""

from __future__ import annotations

import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from worldkv.errors import CheckpointError
from worldkv.models.wan.tokenizer import ByteTokenizer, HFTokenizer, clean_prompt, load_tokenizer


def write_word_tokenizer(folder: Path) -> None:
    """A complete tokenizer of transformers with six words, in its own file format."""
    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2, "pick": 3, "the": 4, "cup": 5}
    special = [
        {
            "id": i,
            "content": c,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for c, i in list(vocabulary.items())[:3]
    ]
    end = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [text, end],
            "pair": [text, end, {"Sequence": {"id": "B", "type_id": 0}}, end],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
        },
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("dirty", "clean"),
    [
        ("  pick\t up \n the   cup ", "pick up the cup"),
        ("fish &amp;amp; chips", "fish & chips"),
        ("the robotâ€™s hand", "the robot's hand"),
        ("&lt;b&gt;", "<b>"),
        ("", ""),
    ],
)
def test_prompts_are_cleaned_as_the_reference_does(dirty: str, clean: str) -> None:
    assert clean_prompt(dirty) == clean


def test_a_folder_without_a_tokenizer_gets_bytes_and_exactly_one_warning(tmp_path: Path) -> None:
    said: list[str] = []
    tokenizer = load_tokenizer(tmp_path, 16, 320, said.append)
    ids, mask = tokenizer.encode("pick")
    assert len(said) == 1
    assert "not this model's own tokenisation" in said[0]
    assert isinstance(tokenizer, ByteTokenizer)
    assert ids.tolist() == [[115, 108, 102, 110, 1] + [0] * 11]
    assert mask.tolist() == [[1] * 5 + [0] * 11]
    assert ids.dtype == mask.dtype == np.int64


def test_the_warning_is_an_ordinary_one_unless_told_otherwise(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no tokenizer"):
        load_tokenizer(tmp_path, 16, 320)


def test_byte_ids_fit_the_golden_vocabulary_whatever_the_text() -> None:
    ids, mask = ByteTokenizer(64, 320).encode("größe 机器人 🤖")
    assert ids.max() < 320
    assert mask.sum() == len("größe 机器人 🤖".encode()) + 1
    assert ByteTokenizer(16, 320).encode("")[0][0, 0] == 1


def test_long_prompts_with_one_beginning_stay_different_in_bytes() -> None:
    tokenizer = ByteTokenizer(16, 320)
    beginning = "A multi-view video shows that a robot "
    first, second = (tokenizer.encode(beginning + end)[0] for end in ("opens the drawer", "picks the cup"))
    assert first.shape == second.shape == (1, 16)
    assert not np.array_equal(first, second)
    assert np.array_equal(first, tokenizer.encode(beginning + "opens the  drawer")[0])  # cleaned alike


def test_bytes_need_room_for_every_byte() -> None:
    with pytest.raises(CheckpointError, match="vocabulary of at least 259"):
        ByteTokenizer(16, 258)
    with pytest.raises(CheckpointError, match="text_len of at least 9"):
        ByteTokenizer(8, 320)


@pytest.mark.parametrize("place", [".", "tokenizer", "google/umt5-xxl"])
def test_the_checkpoints_own_tokenizer_is_used_where_it_carries_one(place: str, tmp_path: Path) -> None:
    write_word_tokenizer(tmp_path / place)
    (tmp_path / "config.json").write_text('{"architectures": ["VLA"]}')  # a checkpoint's, not a tokenizer's
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizer = load_tokenizer(tmp_path, 6, 320)
        ids, mask = tokenizer.encode(" pick  the cup ")
    assert isinstance(tokenizer, HFTokenizer)
    assert ids.tolist() == [[3, 4, 5, 1, 0, 0]]
    assert mask.tolist() == [[1, 1, 1, 1, 0, 0]]
    assert ids.dtype == mask.dtype == np.int64
    assert tokenizer.encode("pick the cup pick the cup pick")[0].tolist() == [[3, 4, 5, 3, 4, 1]]


def test_a_tokenizer_may_be_used_from_many_threads_at_once(tmp_path: Path) -> None:
    write_word_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path, 6, 320)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: tokenizer.encode("pick the cup")[0].tolist(), range(64)))
    assert all(result == [[3, 4, 5, 1, 0, 0]] for result in results)


def test_a_tokenizer_that_does_not_fit_the_text_encoder_is_refused(tmp_path: Path) -> None:
    write_word_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="has 6 tokens, the text encoder only 5"):
        load_tokenizer(tmp_path, 6, 5)


def test_a_damaged_tokenizer_is_an_error_and_never_replaced_silently(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_tokenizer(tmp_path, 16, 320)
