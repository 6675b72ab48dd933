"""What `worldkv bench` says of measurements that robots and videos share. Imports no torch."""

from __future__ import annotations

from worldkv.bench.paced import Figures
from worldkv.show.terminal import size_text


def told_exports(measured: Figures) -> Figures:
    print(f"a session of {measured['chunks']} frames that leaves and comes back, ms")
    for name in ("pages", "compact", "parking"):
        one = measured[name]
        size = size_text(one["bytes"]) if "bytes" in one else "stays here"
        exact = "exact" if one.get("inexact") is None else f"not exact: {one['inexact']}"
        print(f"  {name:<8} {size:>10}  {1e3 * one['leave_s']:9.1f} there, {1e3 * one['back_s']:9.1f} back; {exact}")
    return measured
