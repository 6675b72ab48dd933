"""The policy server: websockets for robots, health and metrics over HTTP, all on one port.

config -> metrics, sessions -> connection -> app -> policy_server: each knows only what stands left of it.
"""
