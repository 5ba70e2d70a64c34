"""Tells prefill workers that blocks which they keep are not needed any more."""

from vllm_commext.nixl.decode.peers import PeerTable
from vllm_commext.nixl.decode.transfers import Source, Transfer, describe_source
from vllm_commext.nixl.log import RateLimitedLog
from vllm_commext.nixl.transport.agent import NixlAgent
from vllm_commext.nixl.wire import messages as wire


class ReleaseSender:
    """Sends one decode worker's releases.

    Args:
        agent: the worker's agent.
        consumer: what prefill workers know this worker by.
        peers: the known prefill workers.
        log: where is said what could not be sent.
    """

    def __init__(
        self, agent: NixlAgent, consumer: str, peers: PeerTable, log: RateLimitedLog
    ) -> None:
        self._agent = agent
        self._consumer = wire.short_id(consumer)
        self._peers = peers
        self._log = log

    def send(self, transfer: Transfer, source: Source) -> None:
        """Tell a prefill worker that this one needs the request's blocks no longer, now or as soon
        as it is ready."""
        if not transfer.remote.is_kept:
            return
        remote, agent_name = transfer.remote, ""
        try:
            agent_name = self._agent_of(transfer, source)
            if agent_name:
                released = wire.Released(
                    request_id=wire.short_id(remote.request_id),
                    consumer=self._consumer,
                    num_consumers=source.num_consumers,
                )
                self._agent.notify(agent_name, wire.encode(released))
        except Exception as error:  # noqa: BLE001 NIXL raises many types; the lease frees the blocks
            link = self._peers.find(source.key)
            if agent_name and link is not None:
                self._peers.doubt(link, broken=True)
            if agent_name and not source.is_retried:
                source.is_retried = True
                self.send(transfer, source)
                return
            text = f"{describe_source(remote)} was not told that its blocks are not needed: {error}"
            self._log.warning("release", text)

    def _agent_of(self, transfer: Transfer, source: Source) -> str:
        """The agent to notify, "" where there is none, or none yet."""
        peer = self._peers.get(source.key)
        if peer is not None and peer.reach is not None:
            return peer.reach.value
        if peer is not None and peer.has_closed:
            return ""
        peer = self._peers.prepare(source.key, transfer.remote.incarnation)
        if peer.ready_link is None:
            peer.releases.append((transfer, source))
        elif peer.ready_link.serves(transfer.remote.incarnation):
            return peer.ready_link.agent_name
        return ""
