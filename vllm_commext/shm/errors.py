"""What can end a wait on the queue, besides a timeout and damaged memory."""

from ..errors import CommextError


class PeerLostError(CommextError, RuntimeError):
    """The other end has died or shut down, so what is waited for cannot come."""


class QueueCancelledError(CommextError, RuntimeError):
    """This end was shut down, by another thread or a signal handler."""
