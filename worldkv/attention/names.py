"""The attention backends by name, and where each is. Imports no torch: a misspelt one is told at once."""

from __future__ import annotations

# name -> (module, class); imported only when chosen
BACKENDS: dict[str, tuple[str, str]] = {
    "reference": ("worldkv.attention.reference", "ReferenceBackend"),
    "cudnn": ("worldkv.attention.cudnn", "CudnnBackend"),
    "flash4": ("worldkv.attention.flash4", "Flash4Backend"),
}


def check_name(name: str) -> None:
    """Raises ValueError, which lists the known ones, for a backend that does not exist."""
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"attention: expected one of {['auto', *sorted(BACKENDS)]}, got {name!r}")
