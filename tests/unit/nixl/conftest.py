"""What the connector's unit tests share."""

from collections.abc import Iterator

import pytest
import zmq


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """Ends with all of its sockets."""
    made = zmq.Context()
    yield made
    made.destroy(linger=0)
