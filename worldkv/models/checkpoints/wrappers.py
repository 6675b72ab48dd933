"""Names of tensors that were saved from inside a wrapper, as those of the model in it.

`torch.compile` puts `_orig_mod.` before the names of what it wraps, DistributedDataParallel `module.` before all, FSDP
and activation checkpointing words of their own. A wrapper wraps all that stands under it: where only some of the names
have its word, two models were mixed, and which is meant cannot be known. Knows names only.
"""

from __future__ import annotations

from collections.abc import Iterable

_ANYWHERE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_BEFORE_ALL = "module"
_MAX_PLACES = 512  # more than any model has blocks


def unwrapped(names: Iterable[str], problems: list[str]) -> tuple[dict[str, str], list[str]]:
    """(plain name -> name as it is stored, the wrappers' words). Appends what is mixed, whose names stay as stored."""
    plain = {name: name for name in names}
    found: list[str] = []
    refused: set[str] = set()
    for _ in range(_MAX_PLACES):
        places = {place for name in plain if (place := _wrapper(name)) is not None} - refused
        if not places:
            break
        place = min(places, key=len)  # the outermost first
        before, word = place[: -len(_word(place))], _word(place)
        inside = [name for name in plain if name.startswith(before)]
        bare = [name for name in inside if not name.startswith(place)]
        if bare:
            refused.add(place)
            where = f"under {before}" if before else "in all"
            problems.append(
                f"{len(inside) - len(bare)} of {len(inside)} names {where} have the wrapper's word {word!r} and "
                f"{bare[0]} has not: two models seem to be mixed; save one state dict, of the module inside"
            )
            continue
        found.append(word)
        plain = {_without(name, place, before): stored for name, stored in plain.items()}
    return plain, sorted(set(found))


def _wrapper(name: str) -> str | None:
    """The name up to the first wrapper's word, that included."""
    parts = name.split(".")
    if parts[0] == _BEFORE_ALL and len(parts) > 1:
        return f"{_BEFORE_ALL}."
    for index, part in enumerate(parts[:-1]):
        if part in _ANYWHERE:
            return ".".join(parts[: index + 1]) + "."
    return None


def _word(place: str) -> str:
    return place.rstrip(".").rpartition(".")[2] + "."


def _without(name: str, place: str, before: str) -> str:
    return before + name.removeprefix(place) if name.startswith(place) else name
