"""Clients in a process of its own: ask a proxy again and again, print what was answered.

`python crowd.py PORT NUM_CLIENTS SECONDS BODY`: BODY as JSON. Waits for a line on standard input
before it begins, so that several processes begin together; prints a JSON object.
"""

import asyncio
import json
import sys

from client import run_clients


def main(port: int, num_clients: int, seconds: float, body: str) -> None:
    sys.stdin.readline()
    samples = asyncio.run(run_clients(port, num_clients, json.loads(body), seconds))
    told = {
        "tokens": samples.num_tokens,
        "requests": samples.num_requests,
        "failed": samples.num_failed,
    }
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
