"""Whether a ZMQ socket's one connection is up, from the events that ZMQ reports about it.

A connection to a process on a host that is up closes with the process, at once.  For a host that
vanished there are TCP's own timeouts.
"""

from __future__ import annotations

import zmq
from zmq.utils.monitor import recv_monitor_message

CONNECT_MS = 2000
"""A connection that is not made by then counts as refused."""
UNACKNOWLEDGED_MS = 5000
"""A connection on which sent bytes are not acknowledged by then is closed."""
KEEPALIVE_SECONDS = (5, 2, 3)
"""TCP keepalive: seconds before the first probe, seconds between two, and how many."""


def endpoint(host: str, port: int) -> str:
    """ZMQ address of a host and port, brackets around IPv6."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def bound_waits(socket: zmq.Socket[bytes]) -> None:
    """Let a vanished host close the socket's connections.  Call it before ``connect``."""
    idle, interval, count = KEEPALIVE_SECONDS
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    socket.setsockopt(zmq.TCP_MAXRT, UNACKNOWLEDGED_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, idle)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, interval)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, count)


class ConnectionWatch:
    """Watches a socket that connects once.  Make it before ``connect``.

    Raises:
        zmq.ZMQError: no socket is left.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._has_failed = False
        events = zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED
        self._events = socket.get_monitor_socket(events)

    def has_failed(self) -> bool:
        """Whether the connection was refused, not made in time, or has closed."""
        while not self._has_failed and self._events.poll(0):
            recv_monitor_message(self._events)
            self._has_failed = True
        return self._has_failed

    def close(self) -> None:
        """Stop watching; call it before the socket is closed."""
        self._socket.disable_monitor()
        self._events.close(linger=0)
