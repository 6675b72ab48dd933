"""From chunks of actions to one action a control step: executes k of n, asks for the next chunk meanwhile.

    with PolicyClient("gpu-box", 8000) as client, ActionBroker(client, execute=16) as broker:
        while True:  # at the robot's control rate
            robot.apply(broker.step(robot.observe()))

Action i of a chunk belongs to the i-th step after the observation that asked for it. A reply that comes d steps later
therefore goes on at its action d, and until then the old chunk's rest is executed. What was asked before a `reset` is
dropped when it comes, and so is a chunk all of whose steps have passed. Frames are collected at every step, and sent
as the model was trained to see them: spread over the steps since the last request; a camera that had none at a step is
sent its frame before that. With a `lead` they are sent as they are taken, ahead of their request. Not thread-safe; the
client belongs to the broker's own thread.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import numpy as np

from worldkv_client.errors import BadRequest, ConnectionLost

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

_TIMEOUT_S = 120.0
_MAX_SEEN = 128  # steps whose frames are kept: more than any chunk has


class Client(Protocol):
    """A PolicyClient, as far as the broker uses it."""

    def infer(self, observation: Mapping[str, Any], /) -> Any: ...
    def reset(self) -> None: ...


class ObservingClient(Client, Protocol):
    """One that sends frames ahead of a request, too."""

    def observe(self, observation: Mapping[str, Any], /) -> int: ...


@dataclass(frozen=True)
class _Asked:
    sequence: int
    step: int  # of the observation
    observation: dict[str, Any] | None  # None: reset
    num_ahead: int = 0  # of its frames, the oldest, were to be sent before it


@dataclass(frozen=True)
class _Taken:
    """Frames that are to be sent ahead of their request."""

    observation: dict[str, Any]


@dataclass(frozen=True)
class _Chunk:
    step: int
    actions: np.ndarray  # [horizon, action_dim]


class ActionBroker:
    """See the module.

    `execute`: steps after which the next chunk is asked for, at most a chunk's. `num_frames`: of each camera in a
    request but the first. `when_late`: with the chunk at its end and no new one here, "hold" repeats its last action,
    "wait" stops the control loop until the reply comes. A hold is logged when it begins. After `hold_limit_s` seconds
    of it `step` raises ConnectionLost, once; the step after that starts over, as the first one: it asks with what is
    seen then, and waits. `lead`: frames are sent as they are taken, the newest of a request so many steps before it:
    if the server can encode them by then, the reply waits for denoising only. 0: the newest goes with the request. A
    request that has to wait for the reply before it brings its step's frame as well. None: all go with the request.
    """

    def __init__(
        self,
        client: Client,
        *,
        execute: int,
        num_frames: int = 4,
        when_late: Literal["hold", "wait"] = "wait",
        hold_limit_s: float = 5.0,
        lead: int | None = None,
    ) -> None:
        """Raises ValueError for what can never work."""
        if execute < 1 or num_frames < 1:
            raise ValueError(f"execute and num_frames: expected at least 1, got {execute} and {num_frames}")
        if when_late not in ("hold", "wait"):
            raise ValueError(f"when_late: expected 'hold' or 'wait', got {when_late!r}")
        if not hold_limit_s > 0:
            raise ValueError(f"hold_limit_s: expected seconds > 0, got {hold_limit_s}")
        if lead is not None and not 0 <= lead < execute:
            raise ValueError(f"lead: expected None, or 0 to execute - 1 ({execute - 1}) steps, got {lead}")
        if lead is not None and not hasattr(client, "observe"):
            raise ValueError(f"lead: expected a client that can `observe`, got {type(client).__name__}; leave it None")
        self._client = client
        self._lead = lead
        self._planned: list[int] = []  # steps whose frames the next request is to have
        self._ahead: list[dict[str, np.ndarray]] = []  # those that are on their way, the newest last
        self._execute = execute
        self._num_frames = num_frames
        self._holds = when_late == "hold"
        self._hold_limit_s = hold_limit_s
        self._held_since: float | None = None
        self.num_late_steps = 0  # for which an action was held, or the loop had to wait
        self.num_dropped = 0  # replies that came too late to be used
        self._sequence = itertools.count()
        self._step = 0
        self._seen: deque[dict[str, np.ndarray]] = deque(maxlen=_MAX_SEEN)  # of the steps since the last request
        self._chunk: _Chunk | None = None
        self._ticked: int | None = None  # the step of the newest observation that was answered
        self._asked: _Asked | None = None
        self._requests: queue.SimpleQueue[_Asked | _Taken | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[tuple[_Asked, Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="worldkv-broker", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def step(self, observation: Mapping[str, Any]) -> np.ndarray:
        """What the robot sees now; returns what it is to do now, [action_dim].

        Images are uint8 [H, W, 3], one a camera; all else goes along as it is. Raises what the client raises, once;
        the next step asks again. The very first step waits for its chunk.
        """
        images = {name: value for name, value in observation.items() if _is_image(value)}
        if not images:
            raise BadRequest("observation: expected at least one image, uint8 [H, W, 3]")
        self._seen.append({name: np.array(image) for name, image in images.items()})
        self._take_replies(wait=False)
        if self._asked is None and (self._chunk is None or self._step - self._chunk.step >= self._execute):
            self._ask(observation)
        else:
            self._send_ahead(observation)
        action = self._action_now()
        self._step += 1
        return action

    def reset(self) -> None:
        """A new episode: the server forgets, and so does this; what is under way is dropped when it comes."""
        self._start_over()
        self._requests.put(_Asked(next(self._sequence), self._step, None))

    def close(self) -> None:
        """Does not wait for a reply under way; the client is its owner's to close. Safe twice."""
        self._requests.put(None)

    def _start_over(self) -> None:
        self._chunk, self._asked, self._ticked, self._held_since = None, None, None, None
        self._seen.clear()
        self._planned, self._ahead = [], []

    def _ask(self, observation: Mapping[str, Any]) -> None:
        cameras = dict.fromkeys(name for images in self._seen for name in images)
        num_ahead = len(self._ahead) if all(images.keys() == cameras.keys() for images in self._ahead) else 0
        if num_ahead:
            late = self._step > self._planned[-1] + (self._lead or 0)
            num_now = max(int(late), self._planned.count(self._step))
            frames = [*self._ahead, *[self._frames_now(cameras)] * num_now]
            stacks = {name: np.stack([images[name] for images in frames]) for name in cameras}
        else:
            offsets = [0] if self._chunk is None else frame_offsets(len(self._seen), self._num_frames)
            stacks = {name: np.stack([self._frame(name, offset) for offset in offsets]) for name in cameras}
        request = {**observation, **stacks}
        if self._ticked is not None:
            request["executed_steps"] = self._step - self._ticked
        self._asked = _Asked(next(self._sequence), self._step, request, num_ahead)
        self._requests.put(self._asked)
        self._seen.clear()
        self._ahead.clear()
        if self._lead is not None:
            num_steps = self._execute - self._lead
            newest = self._step + num_steps
            self._planned = [newest + offset for offset in frame_offsets(num_steps, self._num_frames)]

    def _send_ahead(self, observation: Mapping[str, Any]) -> None:
        """Send this step's frames, if the next request is to have them."""
        count = self._planned.count(self._step)
        if count:
            images = self._frames_now(dict.fromkeys(name for images in self._seen for name in images))
            self._ahead += [images] * count
            stacks = {name: np.stack([image] * count) for name, image in images.items()}
            self._requests.put(_Taken({**observation, **stacks}))

    def _frames_now(self, cameras: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {name: self._frame(name, 0) for name in cameras}

    def _frame(self, camera: str, offset: int) -> np.ndarray:
        """What a camera saw at a step, or last before it; else what it saw first."""
        steps = list(self._seen)
        at = len(steps) - 1 + offset
        return next(images[camera] for images in [*steps[at::-1], *steps[at:]] if camera in images)

    def _action_now(self) -> np.ndarray:
        if self._chunk is None:
            self._take_replies(wait=True)
        assert self._chunk is not None
        index = self._step - self._chunk.step
        if index >= len(self._chunk.actions):
            self.num_late_steps += 1
            if self._holds:
                self._hold()
            else:
                self._take_replies(wait=True)
                index = self._step - self._chunk.step
        action: np.ndarray = self._chunk.actions[min(index, len(self._chunk.actions) - 1)]
        return action

    def _hold(self) -> None:
        now = time.monotonic()
        if self._held_since is None:
            self._held_since = now
            logger.warning("no new chunk yet: its last action is held, for at most %g s", self._hold_limit_s)
        elif now - self._held_since > self._hold_limit_s:
            self._start_over()
            raise ConnectionLost(
                f"no new chunk came, and the last action was held for {self._hold_limit_s:g} s (hold_limit_s); "
                "the next step asks again and waits"
            )

    def _take_replies(self, *, wait: bool) -> None:
        """Use the newest request's reply if it is here; with `wait`, when it is."""
        while wait or not self._replies.empty():
            try:
                asked, reply = self._replies.get(timeout=_TIMEOUT_S)
            except queue.Empty:
                raise ConnectionLost(f"no reply within {_TIMEOUT_S:g} s") from None
            if asked.observation is None and isinstance(reply, BaseException):
                raise reply
            if self._asked is None or asked.sequence != self._asked.sequence:
                self.num_dropped += asked.observation is not None
                continue
            self._asked = None
            if isinstance(reply, BaseException):
                raise reply
            actions = np.asarray(reply["actions"] if isinstance(reply, Mapping) else reply)
            if actions.ndim != 2 or len(actions) < self._execute:
                raise BadRequest(f"execute: {self._execute} steps of a chunk of shape {list(actions.shape)}")
            self._ticked = asked.step
            if not wait and self._step - asked.step >= len(actions):
                self.num_dropped += 1
                continue
            self._chunk, self._held_since = _Chunk(asked.step, actions), None
            return

    def _serve(self) -> None:
        """The broker's thread: one request after the other."""
        all_kept = True  # the frames that were sent ahead since the last one
        while (asked := self._requests.get()) is not None:
            if isinstance(asked, _Taken):
                all_kept = all_kept and self._observe(asked)
                continue
            reply: Any = None
            try:
                if asked.observation is None:
                    self._client.reset()
                else:
                    reply = self._client.infer(_left(asked) if all_kept else asked.observation)
            except Exception as error:
                reply = error
            all_kept = True
            self._replies.put((asked, reply))

    def _observe(self, taken: _Taken) -> bool:
        """Whether the server has kept them; if not, their request brings them, and says why it cannot."""
        try:
            cast(ObservingClient, self._client).observe(taken.observation)
        except Exception as error:
            logger.warning("frames were not sent ahead, their request brings them: %s", error)
            return False
        return True


def frame_offsets(num_steps: int, num_frames: int) -> list[int]:
    """Which of the last `num_steps` steps' frames are sent, 0 the newest: the stock client's -23, -16, -8, 0 for 24."""
    spaced = [-round(num_steps * index / (num_frames - 1)) if num_frames > 1 else 0 for index in range(num_frames)]
    return [max(offset, 1 - num_steps) for offset in reversed(spaced)]


def _left(asked: _Asked) -> dict[str, Any]:
    """What is left to be asked once its first frames have been sent."""
    assert asked.observation is not None
    left = {}
    for name, value in asked.observation.items():
        part = value[asked.num_ahead :] if _is_stack(value) else value
        if not _is_stack(value) or len(part):
            left[name] = part
    return left


def _is_stack(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 4 and value.shape[-1] == 3


def _is_image(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3 and value.shape[-1] == 3
