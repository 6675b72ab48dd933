"""The cache: ids and arithmetic (block_pool, block_table, window, spec), tensors (storage), a session's K/V (state).

Nothing here knows a model, a kernel or a request. Only `storage` imports torch.
"""
