"""A probe, for `server/test_attacks.py`: python health_probe.py PORT SECONDS. Asks for health every 10 ms and prints
the latencies in seconds, as JSON. A process of its own, so that it measures nobody else's work.
"""

from __future__ import annotations

import http.client
import json
import sys
import time


def asked(port: int) -> float | None:
    """Seconds until health was told; None: it was not."""
    start = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", "/healthz")
        healthy = connection.getresponse().status == 200
    except OSError:
        return None
    finally:
        connection.close()
    return time.monotonic() - start if healthy else None


def main(port: int, seconds: float) -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    until, latencies = time.monotonic() + seconds, []
    while time.monotonic() < until:
        latencies.append(asked(port))
        time.sleep(0.01)
    print(json.dumps(latencies), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
