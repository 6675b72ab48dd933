"""Names of fields that nobody knows: are they misspelt? Pure functions."""

from __future__ import annotations

from collections.abc import Collection

from worldkv_client.wire.framing import short

_MAX_NAME_CHARACTERS = 128  # what is longer is no misspelling, and comparing takes its length squared
_LONG = 8  # letters; of a name so long two may be wrong


def near_miss(name: str, known: Collection[str]) -> str | None:
    """The known name that `name` is a misspelling of, if there is one: `env-id`, `promt`, `sesion_id`.

    Another number is another thing (`image_2` for `image_1`), and a short name keeps its first letter.
    """
    if len(name) > _MAX_NAME_CHARACTERS or name in known:
        return None
    letters, numbers = _letters(name)
    for other in known:
        others, other_numbers = _letters(other)
        if letters == others and numbers == other_numbers:
            return other
    for other in known:
        others, other_numbers = _letters(other)
        if numbers != other_numbers:
            continue
        allowed = 2 if len(others) > _LONG else int(letters[:1] == others[:1])
        if abs(len(letters) - len(others)) <= allowed and _num_edits(letters, others) <= allowed:
            return other
    return None


def shown_name(name: object) -> str:
    """A field's name as a message of one line may show it."""
    return name if isinstance(name, str) and name.isprintable() and 0 < len(name) <= 80 else short(name)


def _letters(name: str) -> tuple[str, str]:
    """(what is left without case, digits and marks; the digits)."""
    name = name.casefold()
    return "".join(filter(str.isalpha, name)), "".join(filter(str.isdigit, name))


def _num_edits(one: str, other: str) -> int:
    """Letters left out, added, replaced or swapped with their neighbour (optimal string alignment)."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        row_before, before, row = before, row, [i]
        for j, b in enumerate(other, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and b == one[i - 2]:
                cost = min(cost, row_before[j - 2] + 1)
            row.append(cost)
    return row[-1]
