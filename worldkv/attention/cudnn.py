"""cuDNN's paged attention through nvidia-cudnn-frontend: NVIDIA GPUs from Ampere on, half precision, any power-of-two
block size. Nothing is compiled; cuDNN builds an execution plan once per shape class.

The kernel reads whole tiles of keys and masks what lies past a row's n: those slots must be finite. They are the row's
own (the rest of its last block, and that block again), never a free block's.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cache
from typing import Any

import numpy as np
import torch

from worldkv.kv.block_table import blocks_for
from worldkv.kv.forward import AttentionRow
from worldkv.kv.storage import KVStorage
from worldkv.kv.upload import upload

_MIN_CAPABILITY = (8, 0)
_KEYS_PER_TILE = 256  # no kernel reads more at once; a table is never shorter, or its end would be passed


class CudnnPlan:
    """Block tables, lengths and slots of one batch of rows on the device, and the execution plan for their shape."""

    def __init__(self, storage: KVStorage, rows: Sequence[AttentionRow]) -> None:
        self.storage = storage
        lengths = np.array([[row.num_queries for row in rows], [row.num_visible for row in rows]], dtype=np.int32)
        starts = np.concatenate([[0], np.cumsum(lengths[0])])
        most_queries = int(lengths[0].max())
        tables = _block_tables(rows, storage.block_size)
        num_heads, head_dim = storage.k[0].shape[2:]
        self.shape_class = (len(rows), most_queries, bool((lengths[0] != most_queries).any()), tables.shape[1])
        self._tables = upload(tables, storage.device)
        self._lengths = upload(lengths, storage.device)
        self._starts = upload((starts * num_heads * head_dim).astype(np.int32), storage.device)
        writes = [row.write_slots for row in rows if row.write_slots is not None]
        self.write_slots = upload(np.concatenate(writes), storage.device) if writes else None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that differs between plans of one shape class."""
        return [self._tables, self._lengths, self._starts, *([] if self.write_slots is None else [self.write_slots])]

    def with_own_tensors(self) -> CudnnPlan:
        """A copy whose tensors are its own: a CUDA graph's, say, which others of its class are copied into."""
        own = copy(self)
        own._tables, own._lengths, own._starts = (tensor.clone() for tensor in self.tensors[:3])
        own.write_slots = None if self.write_slots is None else self.write_slots.clone()
        return own

    def run(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor | None = None,
        v_THD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        k_slots, v_slots = self.storage.slots(layer)
        if k_THD is not None and v_THD is not None:
            assert self.write_slots is not None, "this plan only reads"
            k_slots.index_copy_(0, self.write_slots, k_THD.to(k_slots.dtype))
            v_slots.index_copy_(0, self.write_slots, v_THD.to(v_slots.dtype))
        q = q_THD.to(k_slots.dtype).contiguous()
        out = torch.empty_like(q)
        graph, workspace = _graph(self.shape_class, self.storage.k[layer].shape, q.dtype, q.device)
        tensors = {
            _Q: q,
            _K: self.storage.k[layer],
            _V: self.storage.v[layer],
            _OUT: out,
            _TABLE: self._tables,
            _QUERIES: self._lengths[0],
            _KEYS: self._lengths[1],
        }
        if self.shape_class[2]:
            tensors[_STARTS] = self._starts
        graph.execute(tensors, workspace, handle=_handle(q.device))
        return out


def _block_tables(rows: Sequence[AttentionRow], block_size: int) -> np.ndarray:
    """int32 [rows, most blocks, rounded up]; what is masked is read all the same, so it is the row's own last block."""
    most_keys = max(_KEYS_PER_TILE, *(row.num_visible for row in rows))
    tables = np.zeros((len(rows), _round_up(blocks_for(most_keys, block_size))), dtype=np.int32)
    for table, row in zip(tables, rows, strict=True):
        used = row.blocks[: blocks_for(row.num_visible, block_size)]
        table[: len(used)], table[len(used) :] = used, used[-1]
    return tables


class CudnnBackend:
    name = "cudnn"

    def why_not(self, storage: KVStorage) -> str | None:
        """One line on why this backend cannot serve this storage; None where it can."""
        if storage.device.type != "cuda":
            return f"cudnn attention needs an NVIDIA GPU, the cache is on {storage.device}"
        if torch.cuda.get_device_capability(storage.device) < _MIN_CAPABILITY:
            return "cudnn attention needs an Ampere GPU or newer"
        if storage.dtype not in (torch.bfloat16, torch.float16):
            return f"cudnn attention needs bfloat16 or float16, the cache is {storage.dtype}"
        try:
            _library()
        except ImportError as error:
            return f"cudnn attention needs nvidia-cudnn-frontend ({error}): pip install nvidia-cudnn-frontend"
        return None

    def plan(self, storage: KVStorage, rows: Sequence[AttentionRow]) -> CudnnPlan:
        return CudnnPlan(storage, rows)


_Q, _K, _V, _OUT, _TABLE, _QUERIES, _KEYS, _STARTS = range(1, 9)  # tensor ids in the graph


def _round_up(count: int) -> int:
    """To the next power of two, so that a filling window asks for few shape classes."""
    return 1 << (count - 1).bit_length()


@cache
def _library() -> Any:
    import cudnn

    return cudnn


@cache
def _handle_of(index: int) -> Any:
    return _library().create_handle()


def _handle(device: torch.device) -> Any:
    handle = _handle_of(device.index or 0)
    _library().set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    return handle


@cache
def _graph(
    shape_class: tuple[int, int, bool, int], pool_shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> tuple[Any, torch.Tensor]:
    """An execution plan and its workspace. Queries and output are packed [T, H, D], K and V the pool's own layout."""
    num_rows, most_queries, is_ragged, most_blocks = shape_class
    cudnn = _library()
    num_blocks, block_size, num_heads, head_dim = pool_shape
    io_type = cudnn.data_type.BFLOAT16 if dtype == torch.bfloat16 else cudnn.data_type.HALF
    graph = cudnn.pygraph(
        io_data_type=io_type,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=_handle(device),
    )
    token = num_heads * head_dim
    q_dim, q_stride = (num_rows, num_heads, most_queries, head_dim), (most_queries * token, head_dim, token, 1)
    pool_dim, pool_stride = (num_blocks, num_heads, block_size, head_dim), (block_size * token, head_dim, token, 1)

    def integers(uid: int, dim: tuple[int, ...]) -> Any:
        stride = tuple(int(np.prod(dim[i + 1 :])) for i in range(4))
        return graph.tensor(uid=uid, dim=dim, stride=stride, data_type=cudnn.data_type.INT32)

    q = graph.tensor(uid=_Q, dim=q_dim, stride=q_stride, data_type=io_type)
    k = graph.tensor(uid=_K, dim=pool_dim, stride=pool_stride, data_type=io_type)
    v = graph.tensor(uid=_V, dim=pool_dim, stride=pool_stride, data_type=io_type)
    table = integers(_TABLE, (num_rows, 1, most_blocks, 1))
    starts = integers(_STARTS, (num_rows + 1, 1, 1, 1)) if is_ragged else None
    if is_ragged:
        q.set_ragged_offset(starts)
    out, _ = graph.sdpa(
        name="paged_attention",
        q=q,
        k=k,
        v=v,
        generate_stats=False,
        attn_scale=head_dim**-0.5,
        use_padding_mask=True,
        seq_len_q=integers(_QUERIES, (num_rows, 1, 1, 1)),
        seq_len_kv=integers(_KEYS, (num_rows, 1, 1, 1)),
        paged_attention_k_table=table,
        paged_attention_v_table=table,
        paged_attention_max_seq_len_kv=most_blocks * block_size,
    )
    out.set_uid(_OUT).set_output(True).set_dim(q_dim).set_stride(q_stride).set_data_type(io_type)
    if is_ragged:
        out.set_ragged_offset(starts)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return graph, torch.empty(max(graph.get_workspace_size(), 1), device=device, dtype=torch.uint8)
