"""Paged attention: the plan/run interface (backend), the oracle (reference), fast backends behind a registry."""
