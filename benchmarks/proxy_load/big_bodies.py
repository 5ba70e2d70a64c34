"""Sends bodies of token ids to a proxy, one after the other, from a process of its own.

`python big_bodies.py PORT NUM_BYTES SECONDS`; prints how many were answered with status 200.
"""

import http.client
import sys
import time

TOKEN_ID = b"12345,"
PAUSE_SECONDS = 0.5


def main(port: int, num_bytes: int, seconds: float) -> int:
    head, tail = b'{"model":"m","max_tokens":1,"prompt":[', b"7]}"
    ids = TOKEN_ID * ((num_bytes - len(head) - len(tail)) // len(TOKEN_ID))
    body, num_answered = head + ids + tail, 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", body=body, headers=headers)
        response = connection.getresponse()
        response.read()
        num_answered += response.status == 200
        connection.close()
        time.sleep(PAUSE_SECONDS)
    return num_answered


if __name__ == "__main__":
    sys.stdout.write(str(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))))
