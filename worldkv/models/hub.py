"""A checkpoint by its repository's id on the Hugging Face hub: fetched once, kept in its cache, gone on with.

`owner/name` or `owner/name@revision` where a folder is expected. A folder that exists always wins. Only the files that
a family needs are fetched. What the folder lacks and another repository has (a tokenizer) is fetched too, and linked in
beside the rest. The fetching itself is `huggingface_hub`'s. Knows no file of any family: see `models.registry`.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from types import ModuleType

from worldkv.errors import CheckpointError

_REPOSITORY = re.compile(r"(?P<id>\w[\w.\-]*/\w[\w.\-]*)(@(?P<revision>[\w.\-/]+))?", re.ASCII)
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}
_NUM_WORKERS = 2  # the library keeps whole files only: what a stopped run was in the middle of is fetched again
_KEPT = "files that are whole are kept, and the next run goes on with the others"

Tell = Callable[[str], None]


def checkpoint_folder(name: str | Path, revision: str | None = None, tell: Tell | None = None) -> Path:
    """The folder of a checkpoint: `name` itself where it exists or is no repository's id, else what was fetched of it.

    `tell`: called with a line on what is fetched. Raises CheckpointError that says what to do: not installed, not
    reached, unknown, gated, no such revision, no room.
    """
    wanted = _wanted(name, revision)
    if wanted is None:
        return Path(name)
    from worldkv.models.registry import FAMILIES, checkpoint_module, family_of

    patterns = [pattern for family in FAMILIES for pattern in checkpoint_module(family).FILES]
    snapshot = _fetch(wanted, patterns, tell)
    module = checkpoint_module(family_of(snapshot))
    parts = {"": snapshot}
    for place, (repository, files) in module.from_elsewhere(snapshot).items():
        try:
            parts[place] = _fetch(_Wanted(repository, None, repository), files, tell)
        except CheckpointError as error:  # the rest works without, and says how well
            warnings.warn(f"{wanted.id} needs {place} of {repository} beside it: {error}", stacklevel=2)
    return _put_together(wanted, snapshot.name, parts)


def fetched_folder(name: str | Path, patterns: Sequence[str], tell: Tell | None = None) -> Path:
    """As `checkpoint_folder`, of what is no checkpoint: these files of a repository."""
    wanted = _wanted(name, None)
    return Path(name) if wanted is None else _fetch(wanted, patterns, tell)


def is_repository(name: str | Path) -> bool:
    """Whether a name that is no folder here can be a repository's id."""
    return _wanted(name, None) is not None


@dataclass(frozen=True)
class _Wanted:
    id: str
    revision: str | None
    said: str  # as it was given

    def __str__(self) -> str:
        return self.id if self.revision is None else f"{self.id}@{self.revision}"


def _wanted(name: str | Path, revision: str | None) -> _Wanted | None:
    said = str(name)
    found = _REPOSITORY.fullmatch(said)
    if found is None or os.path.lexists(said):
        return None
    return _Wanted(found["id"], revision or found["revision"], said)


def _library(wanted: _Wanted) -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as error:
        raise CheckpointError(
            f"{_no_folder(wanted)}. To fetch it from the hub as a repository, install huggingface_hub: "
            "pip install 'worldkv[hub]'"
        ) from error
    return huggingface_hub


def _fetch(wanted: _Wanted, patterns: Sequence[str], tell: Tell | None) -> Path:
    """The snapshot in the hub's cache. What is there already is not fetched again; halves are gone on with."""
    hub = _library(wanted)
    with _in_our_words(hub, wanted):
        if not hub.constants.HF_HUB_OFFLINE:
            _look_ahead(hub, wanted, patterns, tell)
        folder = hub.snapshot_download(
            wanted.id, revision=wanted.revision, allow_patterns=list(patterns), max_workers=_NUM_WORKERS
        )
    return Path(folder)


def _look_ahead(hub: ModuleType, wanted: _Wanted, patterns: Sequence[str], tell: Tell | None) -> None:
    """What there is to fetch: refused before any byte of it where it is nothing of ours, or more than fits."""
    cache = Path(hub.constants.HF_HUB_CACHE)
    try:
        about = hub.HfApi().model_info(wanted.id, revision=wanted.revision, files_metadata=True)
    except (hub.errors.RepositoryNotFoundError, hub.errors.RevisionNotFoundError, hub.errors.HFValidationError):
        raise
    except Exception:  # not reached: what the cache has may do, and `snapshot_download` says what it lacks
        return
    files = {file.rfilename: file.size or 0 for file in about.siblings or ()}
    ours = {file: size for file, size in files.items() if any(fnmatchcase(file, pattern) for pattern in patterns)}
    if not ours:
        some = ", ".join(sorted(files)[:5]) or "nothing at all"
        raise CheckpointError(f"{wanted} holds nothing that worldkv reads; it has {some}")
    lacking = {
        file: size
        for file, size in ours.items()
        if not isinstance(hub.try_to_load_from_cache(wanted.id, file, revision=about.sha), str)
    }
    needed, free = sum(lacking.values()), _free(cache)
    if free is not None and needed > free:
        raise CheckpointError(
            f"{wanted} needs {_size(needed)} more in {cache}, where {_size(free)} are free; make room, or set HF_HOME "
            "to a larger disk"
        )
    if lacking and tell is not None:
        tell(f"fetching {wanted}: {_size(needed)}, {len(lacking)} of its {len(files)} files, into {cache}")


@contextmanager
def _in_our_words(hub: ModuleType, wanted: _Wanted) -> Iterator[None]:
    endpoint = hub.constants.ENDPOINT
    try:
        yield
    except CheckpointError:
        raise
    except hub.errors.GatedRepoError as error:
        token = "the token in use has no access to it yet" if hub.get_token() else "no token is set"
        raise CheckpointError(
            f"{wanted} is gated: accept its licence at {endpoint}/{wanted.id}, then log in with `hf auth login` or set "
            f"HF_TOKEN; {token}"
        ) from error
    except hub.errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{_no_folder(wanted)}, and no repository {wanted.id} at {endpoint} (a private one needs `hf auth login` "
            "or HF_TOKEN)"
        ) from error
    except hub.errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{wanted.id} has no revision {wanted.revision or 'main'!r} at {endpoint}") from error
    except hub.errors.HFValidationError as error:
        raise CheckpointError(f"{_no_folder(wanted)}, and {wanted.id!r} can be no repository's id: {error}") from error
    except Exception as error:  # of the hub's library, of the HTTP library under it, of the disk
        raise CheckpointError(_other_reason(hub, wanted, error)) from error


def _other_reason(hub: ModuleType, wanted: _Wanted, error: Exception) -> str:
    cache = Path(hub.constants.HF_HUB_CACHE)
    number = error.errno if isinstance(error, OSError) else None
    if number in _NO_ROOM:
        free = _free(cache)
        left = "" if free is None else f", {_size(free)} are free"
        return (
            f"{wanted} cannot be written to {cache}: {os.strerror(number or 0)}{left}; make room, or set HF_HOME to "
            f"another disk; {_KEPT}"
        )
    have = _in_cache(wanted, cache)
    if hub.constants.HF_HUB_OFFLINE:
        return (
            f"{_no_folder(wanted)}; HF_HUB_OFFLINE is set, and the cache {cache} has {have}. Unset it once, where "
            "there is a network, to fetch the rest"
        )
    line = " ".join(str(error).split())[:300]
    return (
        f"{_no_folder(wanted)}; as a repository it could not be fetched from {hub.constants.ENDPOINT} "
        f"({type(error).__name__}: {line}). The cache {cache} has {have}. Behind a proxy or a mirror set HTTPS_PROXY "
        f"or HF_ENDPOINT; {_KEPT}"
    )


def _in_cache(wanted: _Wanted, cache: Path) -> str:
    """What the hub's cache has of a repository, in words."""
    own = cache / f"models--{wanted.id.replace('/', '--')}"
    snapshots = sorted(path.name for path in (own / "snapshots").glob("*"))
    if snapshots:
        return f"some of its files, of revision {', '.join(snapshots[:3])}, and not all that are needed"
    others = [path.name.removeprefix("models--").replace("--", "/") for path in sorted(cache.glob("models--*"))]
    close = difflib.get_close_matches(wanted.id, others, n=1)
    return "nothing of it" + (f" (but of {close[0]})" if close else "")


def _no_folder(wanted: _Wanted) -> str:
    """The other reading of a name, with what stands beside a mistyped folder."""
    path = Path(wanted.said)
    try:
        beside = [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
    except OSError:
        beside = []
    close = difflib.get_close_matches(path.name, beside, n=1)
    hint = f" (did you mean {path.parent / close[0]}?)" if close else ""
    return f"there is no folder {wanted.said}{hint}"


def _put_together(wanted: _Wanted, commit: str, parts: dict[str, Path]) -> Path:
    """A folder of links to all parts, named after the repository, where the hub's library lets others keep things."""
    hub = _library(wanted)
    owner, name = wanted.id.split("/")
    folder = Path(hub.cached_assets_path("worldkv", owner, f"{name}@{commit[:12]}"))
    with _in_our_words(hub, wanted):
        for place, part in parts.items():
            for source in part.rglob("*"):
                if source.is_file():
                    _link(folder / place / source.relative_to(part), source)
    return folder


def _link(link: Path, source: Path) -> None:
    target = source.resolve()
    if link.is_symlink() and link.resolve() == target:
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    fresh = link.with_name(f"{link.name}.{os.getpid()}.partial")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    os.replace(fresh, link)  # two processes may do the same


def _free(folder: PurePath) -> int | None:
    for path in (folder, *folder.parents):
        try:
            return shutil.disk_usage(path).free
        except OSError:
            continue
    return None


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
