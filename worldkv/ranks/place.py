"""Where a rank finds the others: a store that all of them reach, and a number of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore as TCPStore  # type: ignore[attr-defined]

START_S = 600.0  # in which all ranks must have come


@dataclass(frozen=True)
class Place:
    """`host`, `port`: of the store. `is_hosted`: somebody else has opened it, as torchrun does."""

    rank: int
    num_ranks: int
    host: str
    port: int
    is_hosted: bool = False

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Place | None:
        """As torchrun sets it: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. None where RANK is not set. Raises
        ValueError that names what is missing."""
        if "RANK" not in environment:
            return None
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if missing := [name for name in names if name not in environment]:
            raise ValueError(f"environment: RANK is set, but not {' and '.join(missing)}; start ranks with torchrun")
        try:
            rank, num_ranks, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        except ValueError as error:
            raise ValueError(
                f"environment: RANK, WORLD_SIZE and MASTER_PORT: expected whole numbers: {error}"
            ) from None
        hosted = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(rank, num_ranks, environment["MASTER_ADDR"], port, hosted)

    def store(self) -> TCPStore:
        """Opened by rank 0, unless it is hosted."""
        leads = self.rank == 0 and not self.is_hosted
        timeout = timedelta(seconds=START_S)
        return TCPStore(self.host, self.port, is_master=leads, timeout=timeout, wait_for_workers=False)
