"""`worldkv doctor`: is the server there, does it take what this robot sends, is it fast enough? Imports no torch."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from worldkv.cli.common import add_server_address, add_ticks
from worldkv.cli.errors import FAILED, OK, UsageError
from worldkv.cli.places import PICTURES, add_output
from worldkv.cli.preflight import require_packages
from worldkv.client import PolicyClient
from worldkv.errors import BadRequest, ConnectionLost, RemoteError
from worldkv.words import count, reason
from worldkv_client.address import ServerAddress
from worldkv_client.dialling import Route

_NPY = b"\x93NUMPY"
_PROMPT = "check the connection"
_LEAST_SPARE = 0.8  # of a chunk's time: above it a tick that is a little late already stops the robot


class Report:
    """Findings, printed as they come."""

    def __init__(self) -> None:
        self.num_warnings = self.num_failures = 0

    def good(self, what: str, text: str) -> None:
        print(f"  ok    {what:<12} {text}")

    def warn(self, what: str, text: str) -> None:
        self.num_warnings += 1
        print(f"  WARN  {what:<12} {text}")

    def fail(self, what: str, text: str) -> None:
        self.num_failures += 1
        print(f"  FAIL  {what:<12} {text}")


MORE = (
    "Opens a session of its own, ticks it with noise (and once with your observation, if you give one) and\n"
    "deletes it. Warnings of the server are printed as it would log them; a picture shows each camera beside its\n"
    "place in the model's image, since swapped cameras can only be seen. Needs no torch."
)
EXAMPLE = "worldkv doctor --url ws://gpu-box:8000 --observation seen.npz"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_server_address(parser)
    parser.add_argument(
        "--observation", type=Path, metavar="FILE", help="npz with what your robot sends: images, state, prompt"
    )
    add_ticks(parser, 5, "to measure with")
    add_output(parser, "file", "the picture", endings=PICTURES)


def run(arguments: argparse.Namespace) -> int:
    if arguments.output is not None:
        require_packages("plots", "matplotlib", option="--output")
    own = None if arguments.observation is None else _read_observation(arguments.observation)
    report = Report()
    route = Route.to(ServerAddress.parse(arguments.url), arguments.proxy)
    print(f"{route.address}{route}")
    contract = _reach(route, arguments.api_key, report)
    if contract is not None:
        _check_ticks(route, arguments, contract, own, report)
        if arguments.output is not None:
            _draw(arguments.output, contract, own)
    print(f"{count(report.num_failures, 'failure')}, {count(report.num_warnings, 'warning')}")
    return FAILED if report.num_failures else OK


def _reach(route: Route, api_key: str | None, report: Report) -> dict[str, Any] | None:
    """Health, key, room, what is expected; None where nothing more can be checked."""
    try:
        times = []
        for _ in range(5):
            started = time.perf_counter()
            status, health = _get(route, "/healthz", api_key)
            times.append(1e3 * (time.perf_counter() - started))
    except OSError as error:
        report.fail("server", f"nothing answers: {reason(error)}; check host, port, firewall, and that the server runs")
        return None
    if status != 200:
        report.fail(
            "server", f"answers {status}{route}: {health}; wait until it is warm, or read its log{route.advice}"
        )
        return None
    report.good("server", f"is ready; a small request takes {statistics.median(times):.1f} ms")
    status, contract = _get(route, "/v1/embodiment", api_key)
    if status == 404 and (videos := _videos_of(route, api_key)) is not None:
        report.good("key", "is the right one")
        page = route.address.http("/")
        report.fail("robot", f"none is served here: it makes videos of {videos}, see {page}; ask a robot's server")
        return None
    if status != 200:
        said = contract.get("message", contract) if isinstance(contract, Mapping) else contract
        report.fail("key", f"answers {status}: {said}" + ("; give --api-key" if status == 401 else ""))
        return None
    if not isinstance(contract, dict) or "cameras" not in contract:
        report.fail(
            "server", f"{route.address.http('/v1/embodiment')} is no worldkv server's; check host, port and path"
        )
        return None
    status, books = _get(route, "/v1/capacity", api_key)
    room = books["num_more_sessions"] if status == 200 else 0
    tell = report.good if room else report.warn
    tell("room", f"for {count(room, 'more session')}" + ("" if room else ": idle ones are parked, or you are refused"))
    _show(contract, report)
    return contract


def _videos_of(route: Route, api_key: str | None) -> str | None:
    """What a server of videos makes, in words; None: it is none."""
    status, app = _get(route, "/v1/app", api_key)
    if status != 200 or not isinstance(app, Mapping) or app.get("speaks") != "videos":
        return None
    about = app["about"]
    return f"{about['width']} x {about['height']} at {about['frames_per_second']} frames a second"


def _show(contract: Mapping[str, Any], report: Report) -> None:
    report.good("robot", f"{contract['embodiment']}, {contract['rate_hz']:g} Hz")
    for camera in contract["cameras"]:
        size = f"uint8 {camera['height']} x {camera['width']}, {camera['place']}"
        may = ", may be missing" if camera["optional"] else ""
        print(f"        camera       {camera['field']}: {size}{may}")
    for entry in contract["state"]:
        print(f"        state        {entry['field']}: {count(entry['dim'], 'number')} {entry['meaning']}".rstrip())
    frames, horizon = contract["frames_per_tick"], contract["action_horizon"]
    print(f"        a tick       {frames} frames of each camera, over the {horizon} steps since the last one")


def _check_ticks(
    route: Route,
    arguments: argparse.Namespace,
    contract: Mapping[str, Any],
    own: dict[str, Any] | None,
    report: Report,
) -> None:
    rng = np.random.default_rng(0)
    client = PolicyClient(arguments.url, api_key=arguments.api_key, connect_wait=0.0, proxy=arguments.proxy)
    try:
        with client:
            report.good("greeting", ", ".join(f"{name} {value}" for name, value in client.metadata.items()))
            if own is not None:
                _tick(client, contract, own, report, "yours")
                client.reset()
            times = [_tick(client, contract, _noise(contract, rng, 1), report, "first tick")]
            for _ in range(arguments.ticks):
                times.append(
                    _tick(client, contract, _noise(contract, rng, contract["frames_per_tick"]), report, "tick")
                )
            _judge(times, contract, report)
    except (ConnectionLost, RemoteError, BadRequest) as error:
        report.fail("ticks", str(error))
    finally:
        with contextlib.suppress(OSError):
            _get(route, f"/v1/sessions/{client.session_id}", arguments.api_key, "DELETE")


def _tick(
    client: PolicyClient, contract: Mapping[str, Any], observation: dict[str, Any], report: Report, what: str
) -> float:
    """Seconds of one tick; its warnings are reported."""
    started = time.perf_counter()
    reply = client.infer(observation, details=True)
    seconds = time.perf_counter() - started
    assert isinstance(reply, dict), "details come in a map"
    for warning in reply.get("warnings", ()):
        report.warn(what, warning)
    actions, expected = np.asarray(reply["actions"]), (contract["action_horizon"], contract["action_dim"])
    if actions.shape != expected or not np.isfinite(actions).all():
        report.fail(what, f"actions: expected {expected} finite numbers, got shape {actions.shape}")
    elif what != "tick":
        size = f"{count(len(actions), 'action')} of {count(actions.shape[1], 'number')}"
        report.good(what, f"{size} after {seconds:.2f} s")
    return seconds


def _judge(times: list[float], contract: Mapping[str, Any], report: Report) -> None:
    later, chunk = times[1:], contract["chunk_s"]
    median, worst = statistics.median(later), max(later)
    text = f"median {median:.2f} s, slowest {worst:.2f} s; a chunk lasts {chunk:.2f} s"
    if worst > chunk:
        report.fail("speed", f"{text}: the robot has to stop and wait")
    elif worst > _LEAST_SPARE * chunk:
        report.warn("speed", f"{text}: little is to spare")
    else:
        report.good("speed", text)


def _noise(contract: Mapping[str, Any], rng: np.random.Generator, num_frames: int) -> dict[str, Any]:
    observation: dict[str, Any] = {"prompt": _PROMPT}
    for camera in contract["cameras"]:
        shape = (num_frames, camera["height"], camera["width"], 3)
        observation[camera["field"]] = rng.integers(0, 256, shape, dtype=np.uint8)
    for entry in contract["state"]:
        zeros = [0.0] * entry["dim"]
        low, high = entry["low"] or zeros, entry["high"] or zeros
        observation[entry["field"]] = (np.array(low) + np.array(high)) / 2
    return observation


def _what_it_is(start: bytes) -> str:
    """Of a file that is no npz, by how it begins."""
    if start == _NPY:
        return "is one array, npy: save all of them by name"
    if start[:2] == b"PK":
        return "is damaged: its end is missing"
    if start[:1] == b"\x80":
        return "is a Python pickle, which can run code and is never read"
    try:
        start.decode("ascii")
    except ValueError:
        return "is of another kind"
    return "is a text file" if start else "is empty"


def _read_observation(path: Path) -> dict[str, Any]:
    """An npz file's arrays by name; texts as texts. Raises ValueError."""
    wanted = "--observation: expected an npz file of numpy arrays, as numpy.savez writes it"
    try:
        with path.open("rb") as opened:
            start = opened.read(len(_NPY))
        if not zipfile.is_zipfile(path):
            raise UsageError(f"{wanted}; {path} {_what_it_is(start)}")
        with np.load(path) as file:
            found = {name: file[name] for name in file.files}
    except OSError as error:
        raise UsageError(f"{wanted}; {path}: {reason(error)}") from error
    except (ValueError, zipfile.BadZipFile, zlib.error, EOFError, AttributeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{wanted}; {path} is damaged, holds other files than arrays, or arrays of Python objects, which are never "
            "read: save numbers, and texts as numpy strings"
        ) from error
    return {
        name: array.item() if array.dtype.kind in "US" and array.ndim == 0 else array for name, array in found.items()
    }


def _get(route: Route, page: str, api_key: str | None, method: str = "GET") -> tuple[int, Any]:
    """(status, decoded answer). Raises OSError where nothing answers."""
    status, body = route.http(page, api_key=api_key, method=method)
    try:
        return status, json.loads(body)
    except ValueError:
        return status, body.decode(errors="replace").strip()


def _draw(path: Path, contract: Mapping[str, Any], own: dict[str, Any] | None) -> None:
    """Each camera beside its place in the model's image; noise where no observation was given."""
    from matplotlib.figure import Figure

    cameras = contract["cameras"]
    figure = Figure(figsize=(4.2 * len(cameras), 3.2), dpi=120, layout="constrained")
    for axes, camera in zip(figure.subplots(1, len(cameras), squeeze=False)[0], cameras, strict=True):
        image = None if own is None else own.get(camera["field"])
        if image is not None:
            axes.imshow(image if image.ndim == 3 else image[-1])
        axes.set_title(f"{camera['field']}\nis {camera['name']}: {camera['place']}", fontsize=8)
        axes.set_xlabel("" if image is not None else "not given" if own is not None else "give --observation to see it")
        axes.set_xticks([]), axes.set_yticks([])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(f"        picture      {path}: is each camera where its title says?")
