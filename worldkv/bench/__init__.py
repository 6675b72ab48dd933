"""What `worldkv bench` measures: ceilings, attention, the plain baseline, ticks, many sessions. Needs no checkpoint."""
