"""What the connector logs, whether or not vLLM has taken its loggers out of the root's hands."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def log_lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The connector's records, each once: vLLM, where another test imports it, stops them on their
    way to the root logger, which is where ``caplog`` listens."""
    logger = logging.getLogger("vllm.commext.nixl")
    before = logger.propagate
    logger.propagate = False
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, logger=logger.name)
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.propagate = before
