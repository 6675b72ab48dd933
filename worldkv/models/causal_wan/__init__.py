"""Causal Wan video (Self-Forcing, LongLive): blocks of frames in a few steps, over the model's own past."""
