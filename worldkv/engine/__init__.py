"""Sessions, admission and the loop that runs the forwards of many ticks together."""
