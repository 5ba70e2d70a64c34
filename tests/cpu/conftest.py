"""Real servers on CPUs, shared by the tests of a module because each takes long to start."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cpu import event_streams
from tests.kit.composed import Cluster
from tests.kit.tiny_model import FEW_LAYERS, write_tiny_model

SERVER_TIMEOUT = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests here may take as long as their servers do, some longer by a mark of their own."""
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        own = item.get_closest_marker("timeout")
        if own is None or own.args[0] < SERVER_TIMEOUT:
            item.add_marker(pytest.mark.timeout(SERVER_TIMEOUT))


@pytest.fixture(scope="session", autouse=True)
def _forked(forked_servers: None) -> None: ...


@pytest.fixture(scope="module", autouse=True)
def _same_prompts() -> None:
    """Whatever ran in this process before: two tokens may be so near to one another, or a number to
    where it is rounded, that servers which compute a prompt in other steps tell another one."""
    event_streams.number_again()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("models") / "llama", num_layers=FEW_LAYERS["llama"]
    )


@pytest.fixture(scope="session")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the kind's own number of layers, for what depends on how long a prompt or an answer
    takes, or on where a parser cuts what the model says."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "deep")


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return write_tiny_model(
        tmp_path_factory.mktemp("models") / "other", seed=1, num_layers=FEW_LAYERS["llama"]
    )


@pytest.fixture
def composed(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(tmp_path, stack)
