"""What a checkpoint's numbers are stored as, by safetensors' names. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, order=True)
class StoredDtype:
    """`name`: torch's, such as bfloat16. `itemsize`: bytes of a number."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name


KNOWN = {
    "F64": StoredDtype("float64", 8),
    "F32": StoredDtype("float32", 4),
    "F16": StoredDtype("float16", 2),
    "BF16": StoredDtype("bfloat16", 2),
    "F8_E4M3": StoredDtype("float8_e4m3fn", 1),
    "F8_E5M2": StoredDtype("float8_e5m2", 1),
    "I64": StoredDtype("int64", 8),
    "I32": StoredDtype("int32", 4),
    "I16": StoredDtype("int16", 2),
    "I8": StoredDtype("int8", 1),
    "U8": StoredDtype("uint8", 1),
    "BOOL": StoredDtype("bool", 1),
}


def of_torch(dtype: torch.dtype) -> StoredDtype:
    return StoredDtype(str(dtype).removeprefix("torch."), dtype.itemsize)
