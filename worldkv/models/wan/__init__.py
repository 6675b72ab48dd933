"""The shared parts of the families built on Wan: blocks, encoders, kernels."""
