"""What a robot's observations have to hold, as `/v1/embodiment` and the console tell it."""

from __future__ import annotations

from pydantic import BaseModel

from worldkv.robots.embodiment import Embodiment, Quantity
from worldkv.robots.tiling import PLACES


class CameraContract(BaseModel):
    """`place`: where the model sees it in its tiled image. `optional`: black where it is not sent."""

    field: str
    name: str
    height: int
    width: int
    optional: bool
    place: str


class StateContract(BaseModel):
    """`low`, `high`: what training saw, or what the robot's file allows; a tick outside is warned about."""

    field: str
    dim: int
    low: list[float] | None
    high: list[float] | None
    meaning: str


class RobotContract(BaseModel):
    """What an observation has to hold. After a first tick of one frame, a tick has `frames_per_tick` of each camera,
    spread over the `action_horizon` steps since the last one; `max_frames_ahead` of them may be sent before it, as they
    are taken. `chunk_s` is how long a chunk of actions lasts."""

    embodiment: str
    cameras: list[CameraContract]
    state: list[StateContract]
    frames_per_tick: int
    max_frames_ahead: int
    rate_hz: float
    action_horizon: int
    action_dim: int
    chunk_s: float


def robot_contract(robot: Embodiment) -> RobotContract:
    places = PLACES[robot.layout]
    return RobotContract(
        embodiment=robot.tag,
        cameras=[
            CameraContract(
                field=camera.field,
                name=camera.name,
                height=camera.height,
                width=camera.width,
                optional=camera.optional,
                place=place,
            )
            for camera, place in zip(robot.cameras, places, strict=False)
        ],
        state=[_state_contract(quantity) for quantity in robot.state],
        frames_per_tick=robot.frames_per_tick,
        max_frames_ahead=robot.frames_per_tick,
        rate_hz=robot.fps,
        action_horizon=robot.action_horizon,
        action_dim=robot.action_dim,
        chunk_s=robot.action_horizon / robot.fps,
    )


def _state_contract(quantity: Quantity) -> StateContract:
    low = high = None
    if quantity.allowed is not None:
        low, high = ([end] * quantity.dim for end in quantity.allowed)
    elif quantity.training_range is not None:
        low, high = (end.tolist() for end in quantity.training_range)
    return StateContract(field=quantity.field, dim=quantity.dim, low=low, high=high, meaning=quantity.meaning)
