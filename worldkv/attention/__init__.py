"""Paged attention: one plan/run interface (backend), the oracle (reference), and the fast backends behind a registry."""
