"""One row of a forward, as an attention backend sees it: which blocks it reads, and where it writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class AttentionRow:
    """One row's blocks and slots: it attends to slots [0, num_visible) of `blocks`.

    `write_slots` are the physical slots (block * block_size + offset) of the row's current tokens, one per query, or
    None where the row only reads (cross-attention).
    """

    blocks: npt.NDArray[np.int32]
    num_visible: int
    num_queries: int
    write_slots: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True)
class RowLimits:
    """The most that any row of a kind has. A backend may round up to them: then batches of any rows have one shape."""

    num_queries: int
    num_visible: int
