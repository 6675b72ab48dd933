"""worldkv: a paged KV cache with sessions, an engine and a server for autoregressive diffusion world models."""

__version__ = "0.1.0"
