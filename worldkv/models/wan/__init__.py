"""What the families built on Wan share: blocks, encoders, kernels."""
