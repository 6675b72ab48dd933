"""The demonstration: a drawn robot, and a server in a process of its own."""
