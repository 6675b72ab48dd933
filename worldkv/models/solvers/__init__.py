"""Solvers of flow matching, shared by families."""
