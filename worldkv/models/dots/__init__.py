"""Dots: a toy family, small enough to read at a glance. It shows what a family has to bring, and nothing else."""
