"""What the GPU kernels are given: few shapes for many batches, and never a block that is not a row's own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from worldkv.attention.paged import PagedPlan  # noqa: E402
from worldkv.kv.block_table import blocks_for  # noqa: E402
from worldkv.kv.row import AttentionRow  # noqa: E402
from worldkv.kv.spec import KVSpec  # noqa: E402
from worldkv.kv.storage import KVStorage  # noqa: E402
from worldkv.kv.window import Window  # noqa: E402

BLOCK_SIZE = 16
ROWS = st.lists(st.tuples(st.sampled_from([5, 12]), st.integers(1, 600)), min_size=1, max_size=40)


class Plan(PagedPlan):
    def launch(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        return q_THD


def plan_for(lengths: list[tuple[int, int]]) -> tuple[PagedPlan, list[AttentionRow]]:
    storage = KVStorage(KVSpec(1, 1, 4, Window(16, 8), ("a",)), 2, BLOCK_SIZE, "cpu", torch.float32)
    rows, first = [], 7
    for queries, keys in lengths:
        count = blocks_for(keys, BLOCK_SIZE)
        rows.append(AttentionRow(np.arange(first, first + count, dtype=np.int32), keys, queries))
        first += count
    return Plan(storage, rows), rows


@given(ROWS)
def test_rows_keep_their_lengths_and_blocks_and_the_others_ask_nothing(lengths: list[tuple[int, int]]) -> None:
    plan, rows = plan_for(lengths)
    num = len(rows)
    assert plan.lengths[:, :num].T.tolist() == [list(pair) for pair in lengths]
    assert plan.lengths[0, num:].eq(0).all()
    assert plan.lengths[1, num:].eq(1).all()
    assert plan.starts.diff().tolist() == plan.lengths[0].tolist()
    for table, row in zip(plan.tables.tolist(), rows, strict=False):
        assert table[: len(row.blocks)] == row.blocks.tolist()
        assert set(table[len(row.blocks) :]) <= {int(row.blocks[-1])}
    assert set(plan.tables[num:].flatten().tolist()) <= {int(rows[0].blocks[0])}


def test_sixty_four_row_counts_are_seven_shapes() -> None:
    classes = {plan_for([(5, 40)] * count)[0].shape_class for count in range(1, 65)}
    assert {shape[0] for shape in classes} == {1, 2, 4, 8, 16, 32, 64}
    assert len(classes) <= 14


def test_rows_that_write_and_rows_that_only_read_do_not_share_a_plan() -> None:
    plan, rows = plan_for([(5, 40), (5, 40)])
    writing = replace(rows[0], write_slots=np.arange(5))
    assert Plan(plan.storage, [writing]).write_slots is not None
    with pytest.raises(AssertionError, match="do not share a plan"):
        Plan(plan.storage, [writing, rows[1]])
