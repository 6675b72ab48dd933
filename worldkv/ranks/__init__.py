"""One model on several processes, each with a part of it: see docs/ranks.md."""
