"""A tiny ray caster: capsules and a block on a lit table, exact and smooth-edged, a few milliseconds a view.

Knows geometry and light. Does not know what the solids are: `synthetic.py` makes an arm of them.

World axes in metres: x away from the robot's base, y to its left, z up; the table's top is z = 0. Vectors
and colours stand first in an array ([3, N], [3, H, W]); colours are linear until `render` takes their root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

HEIGHT, WIDTH = 180, 320
TABLE_LOW = np.array([-0.24, -0.62, -0.05], np.float32)
TABLE_HIGH = np.array([0.96, 0.62, 0.0], np.float32)
PLATE_CENTRE, PLATE_RADIUS = (0.52, -0.27), 0.115
_LIGHT = np.array([-0.35, 0.42, 0.84], np.float32) / np.float32(np.linalg.norm([-0.35, 0.42, 0.84]))
_LAMP_SPOT = (0.42, 0.05)
_FLOOR_Z = -0.72
_TEXELS_PER_METRE = 640
_SHADOW_TEXELS_PER_METRE = 110
_FAR = np.float32(1e3)


@dataclass(frozen=True, eq=False)
class Capsule:
    """A rod with round ends from `a` to `b`, metres; a ball where the two are equal. `gloss` in 0..1."""

    a: np.ndarray
    b: np.ndarray
    radius: float
    colour: tuple[float, float, float]
    gloss: float = 0.3


@dataclass(frozen=True, eq=False)
class Block:
    """A box that stands on the table, turned by `angle` radians about its vertical axis."""

    centre: np.ndarray
    half: np.ndarray
    angle: float
    colour: tuple[float, float, float]


Solid = Capsule | Block


class Camera:
    """A pinhole at `position` that looks at `target`; `fov` is the vertical field of view in degrees."""

    def __init__(self, position: np.ndarray, target: np.ndarray, up: np.ndarray, fov: float) -> None:
        ahead = (target - position) / np.linalg.norm(target - position)
        right = np.cross(ahead, up)
        right /= np.linalg.norm(right)
        self.position = position.astype(np.float32)
        self.basis = np.stack([right, np.cross(ahead, right), ahead]).astype(np.float32)  # right, down, ahead
        self.focal = float(HEIGHT / 2 / np.tan(np.radians(fov) / 2))  # in pixels

    @cached_property
    def rays(self) -> np.ndarray:
        """Unit directions through the pixels' centres, [3, HEIGHT, WIDTH]."""
        return self.rays_at(np.arange(HEIGHT) + 0.5, np.arange(WIDTH) + 0.5)

    def rays_at(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Unit directions through image points, [3, len(rows), len(columns)]."""
        x = ((columns - WIDTH / 2) / self.focal).astype(np.float32)
        y = ((rows - HEIGHT / 2) / self.focal).astype(np.float32)[:, None]
        scale = 1 / np.sqrt(1 + x * x + y * y)
        right, down, ahead = self.basis
        return np.stack([(right[i] * x + (down[i] * y + ahead[i])) * scale for i in range(3)])

    def window(self, points: np.ndarray, radius: float) -> tuple[slice, slice] | None:
        """The part of the image, (rows, columns), that balls of `radius` around `points` [N, 3] can cover."""
        x, y, z = self.basis @ (points - self.position).T
        if (z < 0.01).all():
            return None
        if (z < radius + 0.02).any():
            return slice(0, HEIGHT), slice(0, WIDTH)
        margin = radius / (z - radius) * self.focal * 1.1 + 2
        u, v = x / z * self.focal + WIDTH / 2, y / z * self.focal + HEIGHT / 2
        rows = slice(max(int((v - margin).min()), 0), min(int((v + margin).max()) + 1, HEIGHT))
        columns = slice(max(int((u - margin).min()), 0), min(int((u + margin).max()) + 1, WIDTH))
        return (rows, columns) if rows.start < rows.stop and columns.start < columns.stop else None


class Backdrop:
    """A camera's picture without solids and shadows; worth keeping while the camera stands still.

    `samples`: rays per pixel along each side.
    """

    def __init__(self, camera: Camera, samples: int = 1) -> None:
        self.camera = camera
        colour = np.zeros((3, HEIGHT * WIDTH), np.float32)
        on_table = np.zeros(HEIGHT * WIDTH, np.float32)
        for dy in (np.arange(samples) + 0.5) / samples:
            for dx in (np.arange(samples) + 0.5) / samples:
                rays = camera.rays_at(np.arange(HEIGHT) + dy, np.arange(WIDTH) + dx).reshape(3, -1)
                seen, top = _background(camera, rays)
                colour += seen
                on_table += top
        self.colour = colour.reshape(3, HEIGHT, WIDTH) / samples**2
        self.on_table = on_table.reshape(HEIGHT, WIDTH) / samples**2  # how much of a pixel is table top
        self.table_pixels = np.flatnonzero(on_table)
        rays = camera.rays.reshape(3, -1)[:, self.table_pixels]
        distance = _plane_distance(camera, rays, 0.0)
        depth = np.full(HEIGHT * WIDTH, _FAR, np.float32)
        depth[self.table_pixels] = distance
        self.depth = depth.reshape(HEIGHT, WIDTH)
        self.shadow_index, self.shadow_weight = _shadow_lookup(camera.position[:2, None] + distance * rays[:2])


def render(backdrop: Backdrop, shadows: np.ndarray, solids: Sequence[Solid]) -> np.ndarray:
    """uint8 [HEIGHT, WIDTH, 3]. `shadows`: from `shadow_map` of the scene's solids."""
    camera = backdrop.camera
    light = np.ones(HEIGHT * WIDTH, np.float32)
    light[backdrop.table_pixels] = (shadows.take(backdrop.shadow_index) * backdrop.shadow_weight).sum(axis=0)
    image = backdrop.colour * (1 - backdrop.on_table * (1 - light.reshape(HEIGHT, WIDTH)))
    depth = backdrop.depth.copy()
    for solid in sorted(solids, key=lambda s: -float(np.linalg.norm(_middle(s) - camera.position))):
        if isinstance(solid, Block):
            _draw_block(camera, solid, image, depth)
        else:
            _draw_capsule(camera, solid, image, depth)
    pixels = np.sqrt(np.clip(image, 0, 1)) * 255 + 0.5
    return np.ascontiguousarray(np.moveaxis(pixels.astype(np.uint8), 0, -1))


def shadow_map(solids: Sequence[Solid]) -> np.ndarray:
    """How much light reaches the table, 0..1, on a grid over its top (x along rows, y along columns)."""
    rows, columns = _shadow_shape()
    light = np.ones((rows, columns), np.float32)
    for solid in solids:
        a, b, radius = _as_rod(solid)
        foot_a, foot_b = (p[:2] - _LIGHT[:2] * (max(p[2], 0) / _LIGHT[2]) for p in (a, b))
        reach = radius + 0.01 + 0.09 * max(a[2], b[2], 0)
        low = np.minimum(foot_a, foot_b) - reach - TABLE_LOW[:2]
        high = np.maximum(foot_a, foot_b) + reach - TABLE_LOW[:2]
        r0, c0 = np.clip((low * _SHADOW_TEXELS_PER_METRE).astype(int), 0, (rows, columns))
        r1, c1 = np.clip((high * _SHADOW_TEXELS_PER_METRE).astype(int) + 1, 0, (rows, columns))
        if r0 >= r1 or c0 >= c1:
            continue
        x = (np.arange(r0, r1, dtype=np.float32)[:, None] + 0.5) / _SHADOW_TEXELS_PER_METRE + TABLE_LOW[0]
        y = (np.arange(c0, c1, dtype=np.float32)[None, :] + 0.5) / _SHADOW_TEXELS_PER_METRE + TABLE_LOW[1]
        along = foot_b - foot_a
        s = ((x - foot_a[0]) * along[0] + (y - foot_a[1]) * along[1]) / max(float(along @ along), 1e-9)
        s = np.clip(s, 0, 1)
        distance = np.hypot(x - foot_a[0] - s * along[0], y - foot_a[1] - s * along[1])
        softness = 0.012 + 0.09 * np.maximum(a[2] + s * (b[2] - a[2]), 0)  # the penumbra grows with height
        umbra = np.clip((radius + softness / 2 - distance) / softness, 0, 1)
        strength = 0.66 * radius / (radius + 0.35 * softness)
        part = light[r0:r1, c0:c1]
        np.minimum(part, 1 - strength * umbra * umbra * (3 - 2 * umbra), out=part)
    return light


def _draw_capsule(camera: Camera, solid: Capsule, image: np.ndarray, depth: np.ndarray) -> None:
    """Exact intersection; an edge pixel's coverage comes from its ray's distance to the axis."""
    a, b, radius = _as_rod(solid)
    window = camera.window(np.stack([a, b]), radius)
    if window is None:
        return
    rays = camera.rays[:, *window].reshape(3, -1)
    axis, to_a, to_b = b - a, camera.position - a, camera.position - b
    length2 = float(axis @ axis)
    along, across = axis @ rays, to_a @ rays
    offset = float(axis @ to_a)
    qa = np.maximum(length2 - along * along, 1e-9)
    qb = length2 * across - offset * along
    qc = length2 * float(to_a @ to_a) - offset * offset - radius * radius * length2
    body = qb * qb - qa * qc
    t = (-qb - np.sqrt(np.maximum(body, 0))) / qa
    distance2 = radius * radius - body / (qa * max(length2, 1e-9))
    position = offset + t * along  # 0..length2 on the rod itself
    for end, to_end, towards in ((position <= 0, to_a, across), (position >= length2, to_b, across - along)):
        cap = towards * towards - float(to_end @ to_end) + radius * radius
        t = np.where(end, -towards - np.sqrt(np.maximum(cap, 0)), t)
        distance2 = np.where(end, radius * radius - cap, distance2)
    edge = (radius - np.sqrt(np.maximum(distance2, 0))) * camera.focal / np.maximum(t, 1e-3)  # in pixels
    cover = np.minimum(edge + 0.5, 1) * ((t > 0.01) & (t < depth[window].ravel()))
    seen = np.flatnonzero(cover > 0)
    cover, t, rays = cover[seen], t[seen], rays[:, seen]
    point = to_a[:, None] + t * rays  # from a
    s = np.clip(axis @ point / max(length2, 1e-9), 0, 1)
    colour = _shade((point - s * axis[:, None]) / radius, rays, solid.colour, solid.gloss)
    row, column = np.divmod(seen, window[1].stop - window[1].start)
    row, column = row + window[0].start, column + window[1].start
    image[:, row, column] += cover * (colour - image[:, row, column])
    depth[row, column] = np.where(cover > 0.5, t, depth[row, column])


def _draw_block(camera: Camera, solid: Block, image: np.ndarray, depth: np.ndarray) -> None:
    """Slab intersection at four points per pixel."""
    window = camera.window(solid.centre[None], float(np.linalg.norm(solid.half)))
    if window is None:
        return
    rows, columns = window
    cosine, sine = np.cos(solid.angle), np.sin(solid.angle)
    turn = np.array([[cosine, sine, 0], [-sine, cosine, 0], [0, 0, 1]], np.float32)
    origin = turn @ (camera.position - solid.centre)
    before = depth[window].ravel()
    colours, cover, nearest = (
        np.zeros((3, before.size), np.float32),
        np.zeros(before.size),
        np.full(before.size, _FAR),
    )
    for dy, dx in ((0.25, 0.25), (0.25, 0.75), (0.75, 0.25), (0.75, 0.75)):
        rays = camera.rays_at(np.arange(rows.start, rows.stop) + dy, np.arange(columns.start, columns.stop) + dx)
        rays = rays.reshape(3, -1)
        t, normal, hit = _slab(origin, turn @ rays, -solid.half, solid.half)
        hit &= t < before
        colours += hit * _shade(turn.T @ normal, rays, solid.colour, 0.25)
        cover += hit
        nearest = np.minimum(nearest, np.where(hit, t, _FAR))
    size = (rows.stop - rows.start, columns.stop - columns.start)
    image[:, *window] = image[:, *window] * (1 - cover.reshape(size) / 4) + colours.reshape(3, *size) / 4
    depth[window] = np.where(cover >= 2, nearest, before).reshape(size)


def _shade(normal: np.ndarray, rays: np.ndarray, colour: tuple[float, float, float], gloss: float) -> np.ndarray:
    """[3, N]: a key light from the upper left, the sky, the table's warm bounce, a highlight, a rim."""
    up = normal[2] * 0.5 + 0.5
    to_light = _LIGHT @ normal
    key = np.maximum(to_light, 0)
    facing = np.clip(-(normal * rays).sum(axis=0), 0, 1)
    half_length = np.sqrt(np.maximum(2 - 2 * (_LIGHT @ rays), 1e-6))  # of light - ray, both of unit length
    highlight = np.maximum((to_light + facing) / half_length, 0) ** 40
    shine, rim = gloss * 0.9 * highlight, gloss * 0.10 * (1 - facing) ** 3
    bounce, sky, warm = (0.26, 0.20, 0.15), (0.36, 0.40, 0.46), (0.86, 0.80, 0.70)
    shaded = np.empty_like(normal)
    for i in range(3):
        light = bounce[i] + (sky[i] - bounce[i]) * up + warm[i] * key
        shaded[i] = colour[i] * light + shine * warm[i] + rim
    return shaded


def _background(camera: Camera, rays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(colour [3, N], whether the ray meets the table's top [N]) of the room without solids."""
    distance = _plane_distance(camera, rays, 0.0)
    row, column = (
        (camera.position[i] - TABLE_LOW[i] + distance * rays[i]) * np.float32(_TEXELS_PER_METRE) for i in (0, 1)
    )
    texture = _table_texture()
    top = (row > 0) & (row < texture.shape[1]) & (column > 0) & (column < texture.shape[2])
    on, off = np.flatnonzero(top), np.flatnonzero(~top)
    texel = row[on].astype(np.int32) * texture.shape[2] + column[on].astype(np.int32)
    rest = rays[:, off]
    room = _room(camera, rest)
    _, normal, side = _slab(camera.position, rest, TABLE_LOW, TABLE_HIGH)
    facing_light = np.maximum(_LIGHT @ normal, 0)
    colour = np.empty_like(rays)
    for channel, wood in enumerate((0.19, 0.125, 0.075)):
        colour[channel, on] = texture[channel].take(texel)
        colour[channel, off] = np.where(side, wood * (0.7 + 0.5 * facing_light), room[channel])
    return colour, top


def _room(camera: Camera, rays: np.ndarray) -> np.ndarray:
    """A wall that is lighter above, and a dark floor that fades into it: [3, N]."""
    height = np.clip(rays[2] * 1.6 + 0.55, 0, 1)
    floor = np.exp(-0.28 * np.minimum(_plane_distance(camera, rays, _FLOOR_Z), 50))
    channels = []
    for low, high, ground in ((0.30, 0.62, 0.10), (0.33, 0.66, 0.105), (0.36, 0.68, 0.12)):
        wall = low + (high - low) * height
        channels.append(wall + (ground - wall) * floor)
    return np.stack(channels)


def _slab(
    origin: np.ndarray, rays: np.ndarray, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(distance, outward normal, whether hit from outside) of rays [3, N] against an axis-aligned box."""
    inverse = 1 / np.where(np.abs(rays) < 1e-6, np.float32(1e-6), rays)
    t1, t2 = ((end - origin).astype(np.float32).reshape(3, 1) * inverse for end in (low, high))
    entry = np.minimum(t1, t2)
    t = entry.max(axis=0)
    hit = (np.maximum(t1, t2).min(axis=0) > t) & (t > 0.01)
    axis = np.arange(3).reshape(3, 1) == entry.argmax(axis=0)
    return np.where(hit, t, _FAR), np.where(axis, -np.sign(rays), np.float32(0)), hit


def _plane_distance(camera: Camera, rays: np.ndarray, z: float) -> np.ndarray:
    """Distance along each ray [3, N] to the horizontal plane at `z`; _FAR where it is not ahead."""
    down = np.where(np.abs(rays[2]) < 1e-6, np.float32(1e-6), rays[2])
    t = (np.float32(z) - camera.position[2]) / down
    return np.where(t > 0, t, _FAR)


def _shadow_shape() -> tuple[int, int]:
    rows, columns = np.ceil((TABLE_HIGH - TABLE_LOW)[:2] * _SHADOW_TEXELS_PER_METRE).astype(int)
    return int(rows), int(columns)


def _shadow_lookup(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bilinear lookup into a shadow map at table points [2, P]: (flat indices [4, P], weights [4, P])."""
    rows, columns = _shadow_shape()
    at = (points - TABLE_LOW[:2, None]) * _SHADOW_TEXELS_PER_METRE - 0.5
    at = np.clip(at, 0, np.array([[rows], [columns]], np.float32) - 1.001)
    row, column = at.astype(np.int32)
    fr, fc = at - np.floor(at)
    index = row * columns + column
    indices = np.stack([index, index + 1, index + columns, index + columns + 1])
    weights = np.stack([(1 - fr) * (1 - fc), (1 - fr) * fc, fr * (1 - fc), fr * fc])
    return indices, weights.astype(np.float32)


@lru_cache(maxsize=1)
def _table_texture() -> np.ndarray:
    """The lit table top, linear colours [3, rows along x, columns along y]: planks, plate, lamp spot."""
    rows, columns = ((TABLE_HIGH - TABLE_LOW)[:2] * _TEXELS_PER_METRE).astype(int)
    x = (np.arange(rows, dtype=np.float32)[:, None] + 0.5) / _TEXELS_PER_METRE + TABLE_LOW[0]
    y = (np.arange(columns, dtype=np.float32)[None, :] + 0.5) / _TEXELS_PER_METRE + TABLE_LOW[1]
    random = np.random.default_rng(7)
    plank = np.floor((y - TABLE_LOW[1]) / 0.155).astype(int)
    tone = random.uniform(0.86, 1.08, plank.max() + 1).astype(np.float32)[plank]
    phase = random.uniform(0, 20, plank.max() + 1).astype(np.float32)[plank]
    warp = y + 0.012 * np.sin(5.1 * x + phase) + 0.006 * np.sin(13 * x + 2 * phase)
    grain = np.sin(520 * warp) + 0.6 * np.sin(913 * warp + phase) + np.sin(170 * warp)
    speckle = random.standard_normal((rows, columns)).astype(np.float32)
    wood = tone * (1 + 0.035 * grain + 0.02 * speckle)
    seam = np.abs((y - TABLE_LOW[1]) / 0.155 % 1 - 0.5) > 0.492
    colour = np.array([0.47, 0.31, 0.18], np.float32) * np.where(seam, 0.55 * wood, wood)[..., None]
    colour = _with_plate(colour, x - PLATE_CENTRE[0], y - PLATE_CENTRE[1])
    spot = 0.62 + 0.52 * np.exp(-((x - _LAMP_SPOT[0]) ** 2 + (y - _LAMP_SPOT[1]) ** 2) / 0.32)
    return np.ascontiguousarray(np.moveaxis(colour * spot[..., None], -1, 0), dtype=np.float32)


def _with_plate(colour: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """`colour` with a plate about x = y = 0: a rim that catches the light, a blue ring, a contact shadow."""
    radius = np.hypot(x, y) / PLATE_RADIUS
    slope = 1 + 0.10 * np.cos(np.arctan2(y, x) - 2.3) * (radius > 0.66)
    fold = 1 - 0.18 * np.exp(-(((radius - 0.66) / 0.03) ** 2))
    glaze = np.array([0.70, 0.70, 0.66], np.float32) * (slope * fold)[..., None]
    ring = np.abs(radius - 0.86) < 0.045
    glaze = np.where(ring[..., None], np.array([0.06, 0.16, 0.36], np.float32), glaze)
    contact = 1 - 0.45 * np.exp(-np.maximum(radius - 1, 0) * 22)
    return np.where((radius < 1)[..., None], glaze, colour * contact[..., None])


def _as_rod(solid: Solid) -> tuple[np.ndarray, np.ndarray, float]:
    """A capsule's ends and radius, float32; of a block, a ball that casts about its shadow."""
    if isinstance(solid, Capsule):
        return solid.a.astype(np.float32), solid.b.astype(np.float32), solid.radius
    foot = solid.centre.astype(np.float32) * np.array([1, 1, 0.6], np.float32)
    return foot, foot, float(np.hypot(*solid.half[:2])) * 0.86


def _middle(solid: Solid) -> np.ndarray:
    return (solid.a + solid.b) / 2 if isinstance(solid, Capsule) else solid.centre
