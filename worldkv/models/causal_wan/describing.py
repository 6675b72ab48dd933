"""What describes a converted folder of causal video: sizes in config.json, the run's settings in causal.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from worldkv.models.causal_wan.config import CLASS_NAMES, SETTINGS_FILE
from worldkv.models.causal_wan.folder import RANDOM_WEIGHTS_KEY, Survey
from worldkv.models.checkpoints.files import CONFIG_FILE, read_json

_SOURCE = "worldkv_source"


def descriptions(survey: Survey, source: str, version: str) -> Mapping[str, str]:
    """File -> its text; with the last one a folder is a checkpoint. `source`: the name of what it was made from."""
    about = {"_class_name": CLASS_NAMES[1], _SOURCE: source, "worldkv_version": version}
    if survey.random_weights:
        about[RANDOM_WEIGHTS_KEY] = "nothing was learned"
    sizes = about | asdict(survey.config.dit)
    return {
        SETTINGS_FILE: json.dumps(asdict(survey.config.blocks), indent=1) + "\n",
        CONFIG_FILE: json.dumps(sizes, indent=1) + "\n",
    }


def described_source(folder: Path) -> object:
    """What a converted folder was made from. Raises CheckpointError for a damaged config.json."""
    return read_json(folder / CONFIG_FILE).get(_SOURCE)
