"""The policy server: websockets for robots, health and metrics over HTTP, all on one port.

config -> metrics -> sessions -> service -> http, rest, robots -> app -> server: each knows only what stands left of it.
"""
