"""Plots, pictures, videos and tables, for people."""
