"""cuDNN's paged attention through nvidia-cudnn-frontend: NVIDIA GPUs from Ampere on, half precision, any power-of-two
block size. Nothing is compiled; cuDNN builds an execution plan once per shape class.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from worldkv.attention.paged import PagedPlan, ShapeClass
from worldkv.kv.row import AttentionRow, RowLimits
from worldkv.kv.storage import KVStorage

_MIN_CAPABILITY = (8, 0)


class CudnnPlan(PagedPlan):
    """cuDNN's execution plan for the rows' shape class, with their tables and lengths."""

    def launch(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        storage, out = self.storage, torch.empty_like(q_THD)
        graph, workspace = _graph(self.shape_class, storage.k[layer].shape, q_THD.dtype, q_THD.device)
        tensors = {
            _Q: q_THD,
            _K: storage.k[layer],
            _V: storage.v[layer],
            _OUT: out,
            _TABLE: self.tables,
            _QUERIES: self.lengths[0],
            _KEYS: self.lengths[1],
        }
        if self.shape_class[2]:
            tensors[_STARTS] = self.starts * (q_THD.shape[1] * q_THD.shape[2])
        graph.execute(tensors, workspace, handle=_handle(q_THD.device))
        return out


class CudnnBackend:
    name = "cudnn"

    def why_not(self, storage: KVStorage) -> str | None:
        """One line on why this backend cannot serve this storage; None where it can."""
        if storage.device.type != "cuda":
            return f"cudnn attention needs an NVIDIA GPU, the cache is on {storage.device}"
        if torch.cuda.get_device_capability(storage.device) < _MIN_CAPABILITY:
            return "cudnn attention needs an Ampere GPU or newer"
        if not storage.format.is_half_precision:
            return f"cudnn attention needs bfloat16 or float16, the cache is {storage.format}"
        try:
            _library()
        except ImportError as error:
            return f"cudnn attention needs nvidia-cudnn-frontend ({error}): pip install nvidia-cudnn-frontend"
        return None

    def plan(self, storage: KVStorage, rows: Sequence[AttentionRow], limits: RowLimits | None = None) -> CudnnPlan:
        return CudnnPlan(storage, rows, limits)


_Q, _K, _V, _OUT, _TABLE, _QUERIES, _KEYS, _STARTS = range(1, 9)  # tensor ids in the graph


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
    shape_class: ShapeClass, pool_shape: torch.Size, dtype: torch.dtype, device: torch.device
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


def num_graphs() -> int:
    """Execution plans that are kept."""
    return _graph.cache_info().currsize
