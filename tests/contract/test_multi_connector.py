"""Our connector as one of several under vLLM's MultiConnector."""

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from tests.contract.engine_in_memory import FULL_SPEC, Engine, Model
from vllm_commext.errors import ConfigError


class OtherMetadata(KVConnectorHandshakeMetadata):
    """What another connector's workers say of themselves."""


def test_another_connectors_description_of_the_workers_stops_the_start() -> None:
    engine = Engine(Model([FULL_SPEC]), "kv_producer")
    with pytest.raises(ConfigError) as raised:
        engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): OtherMetadata()})
    engine.connector.shutdown()
    message = str(raised.value)
    assert "got ['OtherMetadata']" in message
    assert "name CommextNixlConnector before it" in message
