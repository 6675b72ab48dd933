"""Prompt templates of the DreamZero embodiments: part of the model's input to the byte, like a chat template.

Data only. `{p}` is the instruction, lower-cased; an embodiment tag that is not in the table cannot be served.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_DROID = (
    "A multi-view video shows that a robot {p} The video is split into three views: The top view shows the "
    "camera view from the robot's wrist, the bottom-left view shows the camera view from the left exterior "
    "camera, and the bottom-right view shows the camera view from the right exterior camera. During "
    "training, one of the two bottom exterior views may be a black screen (dropped view). The robot {p}"
)
_AGIBOT = (
    "A multi-view video shows that a robot {p} The video is split into four views: The top-left view shows "
    "the camera view from the robot's head, the top-right view shows the camera view from the right hand, "
    "the bottom-left view shows the camera view from the left hand, and the bottom-right view is a black "
    "screen (inactive view). The robot {p}"
)
_YAM = (
    "A multi-view video shows that a robot {p} The video is split into four views: The top-left view shows "
    "the top camera, the top-right view shows the right camera, the bottom-left view shows the left camera, "
    "and the bottom-right view is a black screen. The robot {p}"
)
_HUMAN = "A single view video shows that a human {p}"

PROMPT_TEMPLATES: Mapping[str, str] = MappingProxyType(
    {
        "oxe_droid": _DROID,
        "agibot": _AGIBOT,
        "xdof": _AGIBOT,
        "yam": _YAM,
        "gr1_unified": _HUMAN,
        "mecka_hands": _HUMAN,
    }
)

NEGATIVE_PROMPT = (
    "Vibrant colors, overexposed, static, blurry details, text, subtitles, style, artwork, painting, image, still, "
    "grayscale, dull, worst quality, low quality, JPEG artifacts, ugly, mutilated, extra fingers, bad hands, bad face, "
    "deformed, disfigured, mutated limbs, fused fingers, stagnant image, cluttered background, three legs, many people "
    "in the background, walking backwards."
)
