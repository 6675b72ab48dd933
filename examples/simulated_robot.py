"""What the simulator examples share: cameras, the frame schedule, executing a chunk, a server to talk to, the video.

A simulated robot drives a worldkv server exactly as a real one does: over a websocket, in RoboArena's dialect, on the
stock DROID client's schedule. Its first request holds one frame per camera; each later one holds four, taken while the
24 actions of the reply before it were executed. Nothing here knows which robot it is, nor what the policy has learned.

Cameras are rendered by mujoco's own renderer where OpenGL is installed (EGL, else OSMesa). Where neither is, mujoco
casts a ray per pixel at the same scene: flat colours, no textures and shadows, nothing to install, a sixth of a second
a view. `MUJOCO_GL=egl`, `osmesa` or `disable` (rays) chooses by hand.
"""

from __future__ import annotations

import argparse
import ctypes.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np

from worldkv.client import PolicyClient
from worldkv.demo.raycast import HEIGHT, WIDTH, Camera
from worldkv.demo.server_process import ServerProcess
from worldkv.errors import WorldKVError
from worldkv.show.episode import tile_cameras
from worldkv.show.terminal import spinner
from worldkv.show.video import write_video
from worldkv_client import ServerAddress

CONTROL_HZ = 15
HORIZON = 24  # actions in a reply, all of which are executed
FRAME_OFFSETS = (-23, -16, -8, 0)  # control steps before the request, of the frames in every request but the first
MAX_SPEED = 1.5  # radians per second; a target that is farther away is approached at this speed
RENDERER_HINT = "for mujoco's renderer: apt-get install libegl1 libgl1-mesa-dri, or libosmesa6"
_DEFAULT_RGBA = np.array([0.5, 0.5, 0.5, 1.0], np.float32)  # mujoco's, of a geom that leaves colour to its material
_BEYOND = (0.72, 0.77, 0.82)  # what a ray sees that meets nothing
_FAR_M = 20.0

Views = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Left exterior, right exterior, wrist: uint8 [180, 320, 3] each."""


class SimulatedRobot(Protocol):
    """What an example supplies: a seven-joint arm with a gripper and three cameras in a simulator."""

    prompt: str
    renderer: str  # in words
    joint_limits: tuple[np.ndarray, np.ndarray]  # [7] each, radians; infinite where a joint turns freely

    @property
    def joint_position(self) -> np.ndarray:
        """float64 [7], radians."""

    @property
    def gripper_position(self) -> float:
        """0 open to 1 closed."""

    def look(self) -> Views: ...

    def step(self, joint_target: np.ndarray, gripper_target: float) -> None:
        """One control step, 1/15 s of physics, towards absolute joint positions and a gripper position (0 to 1)."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Mount:
    """Where a camera is fixed: `position`, what it looks at and which way is up, in metres, in the frame of `body`
    (the world if empty). `fov`: vertical, degrees."""

    body: str
    position: tuple[float, float, float]
    target: tuple[float, float, float]
    up: tuple[float, float, float] = (0, 0, 1)
    fov: float = 45

    def camera(self, data: Any) -> Camera:
        """As it stands now in `data`, a mujoco.MjData."""
        body = data.body(self.body or "world")
        rotation, origin = body.xmat.reshape(3, 3), body.xpos
        position, target = (origin + rotation @ np.array(point) for point in (self.position, self.target))
        return Camera(position, target, rotation @ np.array(self.up), self.fov)


class MujocoCameras:
    """Renders mounts in a mujoco simulation. `hidden_groups`: of geoms, such as collision shapes."""

    def __init__(self, model: Any, data: Any, mounts: Sequence[Mount], hidden_groups: Sequence[int] = ()) -> None:
        import mujoco

        self._mujoco, self._model, self._data, self._mounts = mujoco, model, data, mounts
        self._options = mujoco.MjvOption()
        self._options.geomgroup[list(hidden_groups)] = 0
        self._renderer: Any = None
        self.name = f"rays ({RENDERER_HINT})"
        if os.environ.get("MUJOCO_GL", "").lower() not in ("disable", "disabled", "off", "false", "0"):
            try:
                self._renderer = mujoco.Renderer(model, HEIGHT, WIDTH)
                self.name = f"mujoco.Renderer, {os.environ.get('MUJOCO_GL') or 'the default OpenGL'}"
            except Exception as error:  # each OpenGL platform fails in its own way where there is no driver
                print(f"OpenGL is installed but does not work ({error!r}): rays instead", file=sys.stderr)
        if self._renderer is None and "normal" not in (mujoco.mj_multiRay.__doc__ or ""):
            raise ImportError(f"mujoco {mujoco.__version__} cannot cast rays with normals (3.5 can); {RENDERER_HINT}")

    def look(self) -> Views:
        cast = self._rasterise if self._renderer is not None else self._cast
        left, right, wrist = (cast(mount.camera(self._data), mount.fov) for mount in self._mounts)
        return left, right, wrist

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()

    def _rasterise(self, camera: Camera, fov: float) -> np.ndarray:
        renderer = self._renderer
        renderer.update_scene(self._data, camera=-1, scene_option=self._options)
        for eye in renderer.scene.camera:  # two, which mujoco averages
            eye.pos[:], eye.forward[:], eye.up[:] = camera.position, camera.basis[2], -camera.basis[1]
            eye.frustum_top = eye.frustum_near * np.tan(np.radians(fov) / 2)
            eye.frustum_bottom = -eye.frustum_top
        return np.asarray(renderer.render()).copy()

    def _cast(self, camera: Camera, _fov: float) -> np.ndarray:
        """One ray per pixel, shaded by how squarely it meets the surface."""
        geoms, facing = self._hit(camera)
        own, material = self._model.geom_rgba, self._model.geom_matid[:, None]
        is_own = (own != _DEFAULT_RGBA).any(axis=1, keepdims=True) | (material < 0)
        colours = np.where(is_own, own, self._model.mat_rgba[material[:, 0]])[:, :3]
        image = np.where(geoms[..., None] >= 0, colours[geoms] * (0.3 + 0.7 * facing[..., None]), _BEYOND)
        pixels: np.ndarray = (np.clip(image, 0, 1) * 255).astype(np.uint8)
        return pixels

    def _hit(self, camera: Camera) -> tuple[np.ndarray, np.ndarray]:
        """Of each pixel, [180, 320]: the geom that it shows, -1 for none; the cosine between ray and surface normal."""
        rays = np.ascontiguousarray(camera.rays.reshape(3, -1).T, np.float64)
        geoms, distances, normals = np.zeros(len(rays), np.int32), np.zeros(len(rays)), np.zeros(rays.size)
        groups, origin = np.asarray(self._options.geomgroup, np.uint8), camera.position.astype(np.float64)
        scene, results = (self._model, self._data), (geoms, distances, normals)
        self._mujoco.mj_multiRay(*scene, origin, rays.ravel(), groups, True, -1, *results, len(rays), _FAR_M)
        facing = np.abs((normals.reshape(-1, 3) * rays).sum(axis=1))
        return geoms.reshape(HEIGHT, WIDTH), facing.reshape(HEIGHT, WIDTH)


@contextmanager
def importing_mujoco(extra: str) -> Iterator[None]:
    """Around the first import of mujoco: chooses its renderer, unless MUJOCO_GL does. Raises ImportError with what to
    install where something is missing; `extra` is worldkv's."""
    if sys.platform == "linux" and not os.environ.get("MUJOCO_GL"):
        libraries = (("egl", "EGL"), ("osmesa", "OSMesa"))
        found = (platform for platform, library in libraries if ctypes.util.find_library(library))
        os.environ["MUJOCO_GL"] = next(found, "disable")
    chosen = os.environ.get("MUJOCO_GL", "")
    try:
        yield
    except ModuleNotFoundError as error:
        raise ImportError(f"the simulator is not installed ({error}): pip install 'worldkv[{extra}]'") from error
    except (ImportError, AttributeError) as error:  # either, of a library that PyOpenGL does not find
        raise ImportError(f"MUJOCO_GL={chosen} is not usable here ({error}); {RENDERER_HINT}") from error
    finally:
        os.environ["MUJOCO_GL"] = chosen  # robosuite writes its own choice there


def steps_to_look_after(num_steps: int = HORIZON) -> list[int]:
    """Of `num_steps` control steps, counted from 1, those after which a frame is taken: the last is the newest."""
    return [max(1, num_steps + offset) for offset in FRAME_OFFSETS]


def observe(robot: SimulatedRobot, frames: Sequence[Views]) -> dict[str, Any]:
    """A request in RoboArena's names; `frames` from the oldest to the newest."""
    left, right, wrist = (np.stack(views) for views in zip(*frames, strict=True))
    return {
        "observation/exterior_image_0_left": left,
        "observation/exterior_image_1_left": right,
        "observation/wrist_image_left": wrist,
        "observation/joint_position": np.asarray(robot.joint_position, np.float64),
        "observation/gripper_position": np.array([np.clip(robot.gripper_position, 0, 1)]),
        "prompt": robot.prompt,
    }


def execute(robot: SimulatedRobot, actions: np.ndarray) -> tuple[list[Views], float]:
    """All of a chunk, float32 [24, 8], one action per control step; returns the frames of the next request, and the
    farthest that a joint was from its target after a step, radians.

    The joints' targets follow the actions within the joints' limits, no faster than MAX_SPEED.
    """
    if actions.shape != (HORIZON, 8) or not np.isfinite(actions).all():
        raise ValueError(f"actions: expected finite numbers [{HORIZON}, 8], got shape {list(actions.shape)}")
    low, high = robot.joint_limits
    most, target = MAX_SPEED / CONTROL_HZ, robot.joint_position
    seen: dict[int, Views] = {}
    behind = 0.0
    schedule = steps_to_look_after(len(actions))
    for step, action in enumerate(actions.astype(np.float64), start=1):
        target = np.clip(target + np.clip(action[:7] - target, -most, most), low, high)
        robot.step(target, float(np.clip(action[7], 0, 1)))
        behind = max(behind, float(np.abs(robot.joint_position - target).max()))
        if step in schedule:
            seen[step] = robot.look()
    return [seen[step] for step in schedule], behind


def drive(robot: SimulatedRobot, policy: PolicyClient, num_ticks: int) -> np.ndarray:
    """The closed loop, one printed line per tick; returns what was sent, tiled: uint8 [1 + 4 ticks, 360, 640, 3]."""
    frames = [robot.look()]
    film = []
    print("tick  sent      reply     arm moved by  behind its targets by  gripper (asked)")
    for tick in range(num_ticks):
        observation, before = observe(robot, frames), robot.joint_position
        film.append(tile_cameras(observation))
        began = time.perf_counter()
        actions = np.asarray(policy.infer(observation))
        milliseconds = 1000 * (time.perf_counter() - began)
        frames, behind = execute(robot, actions)
        moved, gripper = np.abs(robot.joint_position - before).max(), np.clip(actions[-1, 7], 0, 1)
        print(
            f"{tick:>4}  {len(film[-1])} x 3 {milliseconds:>7.0f} ms {moved:>11.3f} rad {behind:>17.3f} rad  "
            f"{robot.gripper_position:>7.2f} ({gripper:.2f})"
        )
    film.append(tile_cameras(observe(robot, frames)))
    return np.concatenate(film)


@contextmanager
def connect(url: str | None) -> Iterator[PolicyClient]:
    """A client of the server at `url`, or of one that is started on a tiny random checkpoint and stopped afterwards."""
    if url is not None:
        with PolicyClient(url, api_key=os.environ.get("WORLDKV_API_KEY")) as policy:
            print(f"policy    {url}")
            yield policy
        return
    from worldkv.models.dreamzero.random import write_random_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_random_checkpoint(Path(folder) / "checkpoint", action_horizon=HORIZON)
        options = ["--device", "cpu", "--block-size", "16", "--max-sessions", "1"]
        with ServerProcess(checkpoint, Path(folder) / "server.log", options) as server:
            with spinner("starting `worldkv serve` on a tiny checkpoint of random weights"):
                server.wait_until_ready()
            print(f"policy    `worldkv serve`, process {server.pid}: random weights, the motions mean nothing")
            with PolicyClient(port=server.port) as policy:
                yield policy


def run(make_robot: Callable[[int], SimulatedRobot], name: str, description: str, argv: Sequence[str] | None) -> int:
    """An example's command line; `make_robot(seed)`. Returns the exit code: a mistake is one line and 2."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ticks", type=int, default=6, help="replies to execute, 1.6 s of robot time each (6)")
    options.add_argument("--url", help="HOST:PORT of a server, key in WORLDKV_API_KEY (default: start one)")
    options.add_argument("--output", type=Path, default=Path(f"{name}.mp4"), help=f"the video ({name}.mp4)")
    options.add_argument("--seed", type=int, default=0, help="of the simulator's start (0)")
    arguments = options.parse_args(argv)
    previous = signal.signal(signal.SIGTERM, _stop)  # so that the server is stopped whoever stops us
    try:
        if arguments.ticks < 1:
            raise ValueError(f"--ticks: expected at least 1, got {arguments.ticks}")
        if arguments.url is not None:
            ServerAddress.parse(arguments.url)  # before a simulator is started for it
        robot = make_robot(arguments.seed)
        try:
            print(f'robot     {name}, "{robot.prompt}"\ncameras   {robot.renderer}')
            with connect(arguments.url) as policy:
                film = drive(robot, policy, arguments.ticks)
        finally:
            robot.close()
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        write_video(arguments.output, film, fps=len(FRAME_OFFSETS) * CONTROL_HZ / HORIZON)
    except (WorldKVError, ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    print(f"video     {arguments.output}: {len(film)} frames, what the policy was sent and would be next; wrist above")
    return 0


def _stop(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt
