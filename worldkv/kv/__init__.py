"""The cache: ids and arithmetic (block_pool, block_table, window), what it costs (spec, footprint, pages), tensors
(storage), a session's K/V (state, branch, row, conditioning), and its way to the host and back (transfer).

Nothing here knows a model, a kernel or a request. Only `storage` imports torch.
"""
