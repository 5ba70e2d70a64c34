"""The other process of the ring's tests: `child.py <command> <pickled arguments in hex>`.

It prints one line when it has come to the point that the test waits for, and a result at the end.
"""

import os
import pickle
import signal
import sys
import time
from typing import Any

from vllm_commext.shm.ring import RingAddress, RingReader, RingWriter


def say(text: object) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def pattern(number: int) -> bytes:
    length = (number * 7919) % 700 if (number + 1) % 50 else 20_000
    return number.to_bytes(8, "little") + bytes([number % 251]) * length


def attach_and_sleep(address: RingAddress, rank: int) -> None:
    reader = RingReader.attach(address, rank)
    say("attached")
    time.sleep(30)
    reader.close()


def attach_and_exec(address: RingAddress, rank: int) -> None:
    reader = RingReader.attach(address, rank)
    say("attached")
    program = "import time; print('another program', flush=True); time.sleep(30)"
    os.execv(sys.executable, [sys.executable, "-c", program])
    reader.close()


def attach_and_fork(address: RingAddress, rank: int) -> None:
    reader = RingReader.attach(address, rank)
    say("attached")
    if (child := os.fork()) > 0:
        say(child)
    time.sleep(30)
    reader.close()


def write_and_sleep(n_readers: int, capacity_bytes: int, num_records: int) -> None:
    writer = RingWriter.create(n_readers, capacity_bytes)
    say(pickle.dumps(writer.address).hex())
    for number in range(num_records):
        writer.write(pattern(number))
    say("written")
    time.sleep(30)
    writer.close()


def interrupt_reading(address: RingAddress, rank: int) -> None:
    """A handler that raises must end the wait, and the reader must still work."""

    class Alarm(Exception):
        pass

    def on_alarm(*_: Any) -> None:
        raise Alarm

    reader = RingReader.attach(address, rank)
    signal.signal(signal.SIGUSR1, on_alarm)
    try:
        say("attached")
        reader.read(timeout=60)
    except Alarm:
        say("interrupted")
    say(reader.read(timeout=60))


if __name__ == "__main__":
    globals()[sys.argv[1]](*pickle.loads(bytes.fromhex(sys.argv[2])))
