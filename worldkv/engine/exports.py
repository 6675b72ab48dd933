"""Sessions that leave their process and come back: what an export holds, and the core's two operations on it.

An export of pages is a parked session in bytes, exact on the same device and settings; a compact one has its state
only, and its model computes the pages anew. Coming back, either is checked whole on a host thread before anything is
charged; then it is a parked session that is resumed, or a tick that rebuilds one. Conditioning that is stored already
is shared. From a sender who is not trusted, what comes in its place is read by nobody but this session and its forks
(see `transfer.foreign_name`), and what all share otherwise, such as a negative prompt, is charged once more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from worldkv.engine.messages import HostDone, Import
from worldkv.engine.residency import Claim, Leaving
from worldkv.engine.session import Tick
from worldkv.errors import BadRequest, EngineStopped, SessionEnded
from worldkv.kv.transfer import ParkedBranch, ParkedEntry, ParkedKV, native_name
from worldkv.models.base import RebuildsHistory, SavesState

if TYPE_CHECKING:
    import torch

    from worldkv.engine.core import EngineCore, Model
    from worldkv.engine.session import Session
    from worldkv.kv.cache import KVCache
    from worldkv.kv.host import HostBlocks
    from worldkv.kv.storage import Mark
    from worldkv.models.session_file import Part, SessionExport

_MOST_CHUNKS = 2**31
_MAX_REASON = 300  # characters
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entering:
    """A session that comes, checked. `parked` None: its history is to be rebuilt. `inexact`: see SessionInfo."""

    parked: ParkedKV | None
    state: object
    inexact: str | None


class Exports:
    """Engine thread only. Bytes are written and read on host threads."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def leave(self, session: Session, answer: Future[object], *, compact: bool) -> None:
        """Answer with the session in bytes, as its last tick left it. It waits while its pages are copied, and no
        longer; where it is `compact`, not at all."""
        core = self._core
        saver = _saver(core.model)
        if compact:
            _rebuilder(core.model)
            num_bytes = core.residency.compact_bytes(session)
            core.residency.lend(num_bytes)

            def saved(export: SessionExport | Exception) -> None:
                core.residency.lend(-num_bytes)
                _tell(core, answer, export)

            core.on_host(compact_maker(core.model, core.cache, session), saved)
            return

        def copied(leaving: Leaving | Exception) -> None:
            if isinstance(leaving, Exception):
                core.answer(answer, error=leaving)
                return
            try:
                pack = partial(packed, core.model, core.cache, leaving, session.inexact)
                core.on_host(pack, partial(_tell, core, answer))
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

    def enter(self, session: Session, message: Import, answer: Future[object]) -> None:
        """Check what came, then make the new `session` go on from there."""
        core, trusts, rebuilds = self._core, message.trusts, False

        def checked(found: Entering | Exception) -> None:
            if isinstance(found, Exception):
                refused(found)
                return
            nonlocal rebuilds
            rebuilds = found.parked is None
            session.parked, session.state, session.inexact = found.parked, found.state, found.inexact
            if found.inexact is not None:
                fields = {"event": "session_inexact", "session": session.handle.session_id}
                logger.warning("session %s does not go on exactly: %s", fields["session"], found.inexact, extra=fields)
            session.num_blocks_extra = 0 if trusts or found.parked is None else core.admission.blocks_shared
            core.residency.claims.append(Claim("an imported session", granted, refused, session))

        def granted() -> None:
            core.sessions[session.handle] = session
            core.touch(session)
            if rebuilds:
                self._rebuild(session, answer)
            else:
                core.answer(answer, session.handle)

        def refused(error: Exception) -> None:
            session.forget()
            del core.names[session.handle.session_id]
            core.answer(answer, error=error)

        core.on_host(
            partial(unpacked, core.model, core.cache, message.data, trusts=trusts, exact=message.exact), checked
        )

    def _rebuild(self, session: Session, answer: Future[object]) -> None:
        """Compute the history of a session that is charged, and answer with its handle."""
        core, rebuilt = self._core, Future[object]()
        tick = Tick(session, rebuilt, waits_its_turn=True)
        session.tick = tick

        def ended(done: Future[object]) -> None:
            error = done.exception()
            if core.ended:  # nobody takes messages any more
                answer.set_exception(error or EngineStopped(core.why_ended))
            else:
                core.inbox.put(HostDone(partial(self._end_rebuild, session, answer, error)))

        rebuilt.add_done_callback(ended)
        try:
            tick.rollback = session.kv.snapshot()
            core.start(tick, _rebuilder(core.model).rebuild(session.kv, session.state))
        except Exception as error:
            core.finish(tick, error=error)

    def _end_rebuild(self, session: Session, answer: Future[object], error: BaseException | None) -> None:
        core = self._core
        if error is None:
            core.answer(answer, session.handle)
            return
        core.sessions.pop(session.handle, None)
        core.names.pop(session.handle.session_id, None)
        session.forget()
        core.residency.refund(session)
        core.touch(session)
        core.answer(answer, error=error)


def _saver(model: Model) -> SavesState[object]:
    if not isinstance(model, SavesState):
        raise BadRequest(f"export: sessions of {type(model).__name__} cannot leave their process")
    return model


def _rebuilder(model: Model) -> RebuildsHistory[object]:
    if not isinstance(model, RebuildsHistory):
        raise BadRequest(f"export: compact: sessions of {type(model).__name__} cannot be computed anew; export pages")
    return model


def _tell(core: EngineCore, answer: Future[object], export: SessionExport | Exception) -> None:
    if isinstance(export, Exception):
        core.answer(answer, error=export)
    else:
        core.answer(answer, export)


# bytes


def compact_maker(model: Model, cache: KVCache, session: Session) -> Callable[[], SessionExport]:
    """What makes a session's compact export, as its last tick left it, on any thread and whatever the session does
    meanwhile: its state is a value. Engine thread only."""
    return partial(_packed_compactly, model, cache, session.state, cache.storage.mark(), session.inexact)


def _packed_compactly(model: Model, cache: KVCache, state: object, mark: Mark, inexact: str | None) -> SessionExport:
    from worldkv.models.session_file import Part, write

    rebuilder = _rebuilder(model)
    with cache.storage.aside(mark):
        saved = _saver(model).save_state(rebuilder.compact(state))
    inexact = rebuilder.why_inexact(state) or inexact
    about = {"kind": "compact", "model": _identity(model, cache), "inexact": inexact, "state": saved.values}
    export = write(about, {name: Part.of(tensor) for name, tensor in saved.tensors.items()})
    return replace(export, inexact=inexact)


def packed(model: Model, cache: KVCache, leaving: Leaving, inexact: str | None = None) -> SessionExport:
    """A session in bytes, its pages included. On a host thread."""
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
        "inexact": inexact,
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


def unpacked(
    model: Model, cache: KVCache, data: bytes | bytearray, *, trusts: bool = True, exact: bool = False
) -> Entering:
    """What an export holds. Raises BadRequest that says what cannot go on here, and why. On a host thread."""
    from worldkv.models.saving import Saved, check_same
    from worldkv.models.session_file import read

    saver = _saver(model)
    about, tensors = read(data)
    inexact, is_compact = about.get("inexact"), about.get("kind") == "compact"
    if not is_compact:
        check_same(about, {"kind": "pages"}, "export")
    check_same(about.get("model"), _identity(model, cache), "model")
    if inexact is not None and not (isinstance(inexact, str) and len(inexact) <= _MAX_REASON):
        raise BadRequest(f"import: inexact: expected a text of at most {_MAX_REASON} characters, or null")
    if is_compact:
        rebuilder, saved = _rebuilder(model), Saved(about.get("state"), tensors)
        state = rebuilder.load_compact(saved)
        found = Entering(None, state, rebuilder.why_inexact(state) or inexact)
    else:
        found = _unpacked_pages(saver, cache, about, tensors, inexact, trusts=trusts)
    if exact and found.inexact is not None:
        raise BadRequest(f"import: exact: {found.inexact}; import it without `exact`, or export its pages")
    return found


def _unpacked_pages(
    saver: SavesState[object],
    cache: KVCache,
    about: Mapping[str, object],
    tensors: Mapping[str, torch.Tensor],
    inexact: str | None,
    *,
    trusts: bool,
) -> Entering:
    from worldkv.models.saving import Saved

    reading = _Reading(cache, tensors, trusts)
    entries = reading.entries(about.get("entries"))
    branches = reading.branches(about.get("branches"), list(entries))
    used = {key for branch in branches.values() for key in branch.conditioning.values()}
    if used != set(entries):
        raise BadRequest("import: entries: expected those that branches read, and no others")
    rest = {name: tensor for name, tensor in tensors.items() if name not in reading.taken}
    state = saver.load_state(Saved(about.get("state"), rest))
    return Entering(cache.parted(ParkedKV(branches, entries)), state, inexact)


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
        "weights": model.card.weights,
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
