"""Sessions that leave their process and come back: what an export holds, and the core's two operations on it.

An export is a parked session in bytes, exact on the same device and settings. Coming back, it is checked whole on a
host thread before anything is charged; then it is a parked session that is resumed. Conditioning that is stored already
is shared. From a sender who is not trusted, what comes in its place is read by nobody but this session and its forks
(see `transfer.foreign_name`), and what all share otherwise, such as a negative prompt, is charged once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from worldkv.engine.residency import Claim, Leaving
from worldkv.errors import BadRequest, SessionEnded
from worldkv.kv.transfer import ParkedBranch, ParkedEntry, ParkedKV, native_name
from worldkv.models.base import SavesState

if TYPE_CHECKING:
    import torch

    from worldkv.engine.core import EngineCore, Model
    from worldkv.engine.session import Session
    from worldkv.kv.cache import KVCache
    from worldkv.kv.host import HostBlocks
    from worldkv.models.session_file import Part, SessionExport

_MOST_CHUNKS = 2**31


class Exports:
    """Engine thread only. Bytes are written and read on host threads."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def leave(self, session: Session, answer: Future[object]) -> None:
        """Answer with the session in bytes, as its last tick left it. It waits while it is copied, and no longer."""
        core = self._core
        saver = _saver(core.model)

        def copied(leaving: Leaving | Exception) -> None:
            if isinstance(leaving, Exception):
                core.answer(answer, error=leaving)
                return
            try:
                core.on_host(partial(packed, core.model, core.cache, leaving), partial(_tell, core, answer))
            except Exception as error:  # the engine ends, and its threads with it
                core.answer(answer, error=error)

        def settled() -> None:
            if session.closed_for is not None:
                core.answer(answer, error=SessionEnded(f"session {session.handle.session_id} was closed"))
                return
            try:
                core.residency.copy_out(session, saver.save_state, copied)
            except Exception as error:
                core.answer(answer, error=error)

        session.when_settled(settled)

    def enter(self, session: Session, data: bytes | bytearray, answer: Future[object], *, trusts: bool) -> None:
        """Check what came, then make the new `session` go on from there."""
        core = self._core

        def checked(found: tuple[ParkedKV, object] | Exception) -> None:
            if isinstance(found, Exception):
                refused(found)
                return
            session.parked, session.state = found
            session.num_blocks_extra = 0 if trusts else core.admission.blocks_shared
            core.residency.claims.append(Claim("an imported session", granted, refused, session))

        def granted() -> None:
            core.sessions[session.handle] = session
            core.touch(session)
            core.answer(answer, session.handle)

        def refused(error: Exception) -> None:
            session.forget()
            del core.names[session.handle.session_id]
            core.answer(answer, error=error)

        core.on_host(partial(unpacked, core.model, core.cache, data, trusts=trusts), checked)


def _saver(model: Model) -> SavesState[object]:
    if not isinstance(model, SavesState):
        raise BadRequest(f"export: sessions of {type(model).__name__} cannot leave their process")
    return model


def _tell(core: EngineCore, answer: Future[object], export: SessionExport | Exception) -> None:
    if isinstance(export, Exception):
        core.answer(answer, error=export)
    else:
        core.answer(answer, export)


# bytes


def packed(model: Model, cache: KVCache, leaving: Leaving) -> SessionExport:
    """A session in bytes. On a host thread."""
    from worldkv.models.session_file import Part, write  # here: they need torch

    parked, saved, window = cache.whole(leaving.parked), leaving.saved, cache.whole_spec.window
    numbers = {key: number for number, key in enumerate(parked.entries)}
    tensors: dict[str, Part] = {name: Part.of(tensor) for name, tensor in saved.tensors.items()}
    for key, entry in parked.entries.items():
        tensors |= _pages(f"entry{numbers[key]}", entry.num_tokens, entry.blocks, cache)
    for name, branch in parked.branches.items():
        tensors |= _pages(f"branch.{name}", window.num_slots(branch.num_chunks), branch.blocks, cache)
    about = {
        "kind": "pages",
        "model": _identity(model, cache),
        "branches": {
            name: {
                "num_chunks": branch.num_chunks,
                "conditioning": {kind: numbers[key] for kind, key in branch.conditioning.items()},
            }
            for name, branch in parked.branches.items()
        },
        "entries": [{"key": native_name(key), "num_tokens": entry.num_tokens} for key, entry in parked.entries.items()],
        "state": saved.values,
    }
    return write(about, tensors)


def _pages(name: str, num_tokens: int, held: HostBlocks, cache: KVCache) -> dict[str, Part]:
    """K and V of each layer, in the order of the logical slots, whatever the size of a block."""
    from worldkv.models.session_file import Part

    spec = cache.whole_spec
    shape = (num_tokens, spec.num_heads, spec.head_dim)
    parts = {}
    for layer in range(spec.num_layers):
        for kind, pieces in zip("kv", held.tokens(layer, num_tokens), strict=True):
            parts[_page(name, layer, kind)] = Part(cache.storage.dtype, shape, pieces)
    return parts


def unpacked(model: Model, cache: KVCache, data: bytes | bytearray, *, trusts: bool = True) -> tuple[ParkedKV, object]:
    """What `packed` wrote: a history on the host, and a state. Raises BadRequest that says what cannot go on here, and
    why. On a host thread."""
    from worldkv.models.saving import Saved, check_same
    from worldkv.models.session_file import read

    saver = _saver(model)
    about, tensors = read(data)
    check_same(about, {"kind": "pages"}, "export")
    check_same(about.get("model"), _identity(model, cache), "model")
    reading = _Reading(cache, tensors, trusts)
    entries = reading.entries(about.get("entries"))
    branches = reading.branches(about.get("branches"), list(entries))
    used = {key for branch in branches.values() for key in branch.conditioning.values()}
    if used != set(entries):
        raise BadRequest("import: entries: expected those that branches read, and no others")
    rest = {name: tensor for name, tensor in tensors.items() if name not in reading.taken}
    state = saver.load_state(Saved(about.get("state"), rest))
    return cache.parted(ParkedKV(branches, entries)), state


class _Reading:
    def __init__(self, cache: KVCache, tensors: Mapping[str, torch.Tensor], trusts: bool) -> None:
        self._cache, self._tensors, self._trusts = cache, tensors, trusts
        self.taken: set[str] = set()

    def entries(self, listed: object) -> dict[str, ParkedEntry]:
        """By key, in order."""
        found: dict[str, ParkedEntry] = {}
        spec = self._cache.whole_spec
        if not isinstance(listed, list) or len(listed) > len(spec.branches) * len(spec.conditioning):
            raise BadRequest("import: entries: expected a list of at most one for each branch and kind")
        for number, each in enumerate(listed):
            key, num_tokens = (each.get("key"), each.get("num_tokens")) if isinstance(each, dict) else (None, None)
            if not isinstance(key, str) or key in found or len(key) > 1000:
                raise BadRequest(f"import: entries.{number}.key: expected a text of its own, got {str(key)[:60]!r}")
            if type(num_tokens) is not int or num_tokens not in spec.conditioning.values():
                raise BadRequest(f"import: entries.{number}.num_tokens: expected one of {dict(spec.conditioning)}")
            found[key] = ParkedEntry(
                num_tokens, self._blocks(f"entry{number}", num_tokens), is_foreign=not self._trusts
            )
        return found

    def branches(self, named: object, keys: list[str]) -> dict[str, ParkedBranch]:
        spec = self._cache.whole_spec
        if not isinstance(named, dict) or set(named) != set(spec.branches):
            raise BadRequest(f"import: branches: expected {list(spec.branches)}")
        return {name: self._branch(name, named[name], keys) for name in spec.branches}

    def _branch(self, name: str, told: object, keys: list[str]) -> ParkedBranch:
        spec, where = self._cache.whole_spec, f"import: branches.{name}"
        num_chunks, read = (
            (told.get("num_chunks"), told.get("conditioning")) if isinstance(told, dict) else (None, None)
        )
        most = spec.window.max_chunks if spec.window.policy == "reset" else _MOST_CHUNKS
        if type(num_chunks) is not int or not 0 <= num_chunks <= most:
            raise BadRequest(f"{where}.num_chunks: expected 0 to {most}, got {str(num_chunks)[:60]}")
        if not isinstance(read, dict) or (num_chunks and set(read) != set(spec.conditioning)):
            raise BadRequest(f"{where}.conditioning: expected {list(spec.conditioning)}")
        conditioning = {}
        for kind, number in read.items():
            if kind not in spec.conditioning or type(number) is not int or not 0 <= number < len(keys):
                raise BadRequest(f"{where}.conditioning: expected entries' numbers by {list(spec.conditioning)}")
            conditioning[kind] = keys[number]
            shape = self._tensors[_page(f"entry{number}", 0, "k")].shape
            if shape[0] != spec.conditioning[kind]:
                raise BadRequest(f"{where}.conditioning.{kind}: expected an entry of {spec.conditioning[kind]} tokens")
        return ParkedBranch(num_chunks, self._blocks(f"branch.{name}", spec.window.num_slots(num_chunks)), conditioning)

    def _blocks(self, name: str, num_tokens: int) -> HostBlocks:
        spec, storage = self._cache.whole_spec, self._cache.storage
        expected = (num_tokens, spec.num_heads, spec.head_dim)
        layers = []
        for layer in range(spec.num_layers):
            pair = []
            for kind in "kv":
                page = _page(name, layer, kind)
                tensor = self._tensors.get(page)
                if tensor is None or tuple(tensor.shape) != expected or tensor.dtype != storage.dtype:
                    came = "none" if tensor is None else f"{tensor.dtype} of {list(tensor.shape)}"
                    raise BadRequest(f"import: {page}: expected {storage.dtype} of {list(expected)}, got {came}")
                self.taken.add(page)
                pair.append(tensor)
            layers.append((pair[0], pair[1]))
        return storage.laid_out(layers)


def _page(name: str, layer: int, kind: str) -> str:
    return f"{name}.layer{layer}.{kind}"


def _identity(model: Model, cache: KVCache) -> dict[str, object]:
    """What a reader has to have as well; the size of a block and of the pool may differ."""
    spec, window = cache.whole_spec, cache.whole_spec.window
    return {
        "family": model.card.family,
        "sizes": model.card.sizes,
        "pages": str(cache.storage.format),
        "num_layers": spec.num_layers,
        "num_heads": spec.num_heads,
        "head_dim": spec.head_dim,
        "chunk_size": window.chunk_size,
        "window": window.window,
        "sink": window.sink,
        "policy": window.policy,
        "branches": list(spec.branches),
        "conditioning": dict(spec.conditioning),
        "reads_copy": spec.reads_copy,
    }
