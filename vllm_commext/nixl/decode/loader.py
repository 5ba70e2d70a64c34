"""The decode side of a worker: loads begin, their shards wait for their peers, are read, and end.

Each step for one of them runs in a guard of its own: an error ends that shard of that load, with
its reason, and no other.
"""

import time
from collections.abc import Callable, Generator
from functools import partial

from vllm_commext.errors import CommextError, CommextTimeoutError, ProtocolError
from vllm_commext.nixl.config import ConnectorConfig, parse_address
from vllm_commext.nixl.decode.links import Link, LocalWorker
from vllm_commext.nixl.decode.peers import Peer, PeerTable
from vllm_commext.nixl.decode.reads import BlockRead, End, ReadSet, prepare
from vllm_commext.nixl.decode.transfers import Failure, ShardRead, failure_of, restarted
from vllm_commext.nixl.decode.uses import Uses
from vllm_commext.nixl.log import RateLimitedLog, logger
from vllm_commext.nixl.recorder import TransferRecorder
from vllm_commext.nixl.requests import CompletionQueue, Load, PeerKey
from vllm_commext.nixl.stream.follower import Follower, failure_of_stream
from vllm_commext.nixl.transport.agent import NixlAgent
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.client import BackOff, SideChannel, SideChannelClient
from vllm_commext.nixl.wire.description import WorkerDescription, open_description
from vllm_commext.nixl.wire.seal import read_secret

BUSY_SECONDS = 5e-4
"""Reads are looked at without a pause for as long, if they move on: the engine's thread may want
the interpreter."""


class Loader:
    """Runs one worker's loads.  Owned by one thread.

    Args:
        probe: given the first peer that is reached, measures how fast it is read, in turns.
    """

    def __init__(
        self,
        agent: NixlAgent,
        config: ConnectorConfig,
        local: LocalWorker,
        recorder: TransferRecorder,
        outcomes: CompletionQueue,
        probe: Callable[[Link], Generator[None]] | None,
    ) -> None:
        self._config = config
        self._recorder = recorder
        self._outcomes = outcomes
        self._probe = probe
        self._probing: tuple[Link, Generator[None]] | None = None
        self.client = SideChannelClient(read_secret(config.side_channel_secret_file))
        self._peers = PeerTable(agent, config, local, recorder, self.client)
        self._preconnect = Preconnect(self.client, config, self._connect)
        self._reads = ReadSet(agent, recorder, config.max_bytes_in_flight, config.transfer_timeout)
        self.streams = Follower(agent, config.transfer_timeout)
        self._log = RateLimitedLog()
        self.uses = Uses(agent, local, self._peers, recorder, outcomes)

    @property
    def num_reads(self) -> int:
        return len(self._reads) + self.streams.num_looks + self._peers.sweeper.is_reading

    @property
    def has_duties(self) -> bool:
        is_known = not len(self._preconnect) and self._probing is None
        return len(self.uses) > 0 or not is_known or self._peers.has_sweeps_due

    def poll(self) -> bool:
        """Look once at everything under way; True if anything has moved on.  Shards that wait for
        room come after the reads that may have made some."""
        num_moves = self.streams.num_moves
        self.client.poll()
        ended = self._peers.poll()
        for peer in ended:
            self._on_handshake_done(peer)
        has_progressed = self._go_on_reading() or bool(ended)
        self._read_streams()
        self._serve_waiting()
        self.uses.keep_alive.send_due()
        self.uses.release_due()
        self._go_on_probing()
        return has_progressed or self.streams.num_moves > num_moves

    def gauges(self) -> dict[str, float]:
        peers = {f"peers/{state}": num for state, num in self._peers.count_states().items()}
        return {"transfers_in_flight": len(self._reads), **peers}

    def close(self) -> None:
        self._end_probing()
        self.uses.release_all()
        self._peers.close()
        self.client.close()

    def begin(self, load: Load) -> None:
        self.uses.begin(load, self._start)

    def _start(self, shard: ShardRead) -> None:
        try:
            peer = self._peers.prepare(shard.key, shard.remote.incarnation)
        except Exception as error:  # noqa: BLE001 one shard's error is no other's
            self.uses.close(shard, failure_of(error, "handshake"))
            return
        peer.waiting.append(shard)
        self._serve(peer)

    def _serve_waiting(self) -> None:
        for peer in self._peers.waiting():
            try:
                if peer.ready_link is None:
                    self._peers.prepare(peer.key, peer.waiting[0].remote.incarnation)
                self._serve(peer)
            except Exception as error:  # noqa: BLE001 one peer's error is no other's
                self._fail_waiting(peer, failure_of(error, "handshake"))

    def _on_handshake_done(self, peer: Peer) -> None:
        link = peer.ready_link
        if link is not None:
            if self._probe is not None:
                self._probing = link.hold(), self._probe(link)
                self._probe = None
            self._serve(peer)
        else:
            self._fail_waiting(peer, failure_of(peer.channel.error, "handshake"))
        releases, peer.releases = peer.releases, []
        for prefill, source in releases:
            self.uses.send_release(prefill, source)

    def _fail_waiting(self, peer: Peer, failure: Failure) -> None:
        while peer.waiting:
            self.uses.close(peer.waiting.popleft(), failure)

    def _connect(self, host: str, port: int, incarnation: str, first: WorkerDescription) -> None:
        for worker in self.uses.workers(first.layout.tp_size, first.layout.pp_size):
            key = PeerKey(first.engine_id, host, port, worker)
            try:
                self._peers.prepare(key, incarnation)
            except CommextError as error:
                logger.info("prefill engine %s is asked with its first request: %s", key, error)

    def _go_on_probing(self) -> None:
        if self._probing is None or len(self._reads) or self._peers.is_wanted:
            return
        link, turns = self._probing
        try:
            if not link.retired:
                next(turns)
                return
        except StopIteration:
            pass
        except Exception as error:  # noqa: BLE001 NIXL raises many types; nothing depends on it
            logger.warning("self-probe: the peer's memory could not be read: %s", error)
        self._end_probing()

    def _end_probing(self) -> None:
        probing, self._probing = self._probing, None
        if probing is not None:
            link, turns = probing
            self._guard("probe", turns.close)
            link.drop()

    def _serve(self, peer: Peer) -> None:
        while peer.waiting and (link := peer.ready_link) is not None:
            shard = peer.waiting.popleft()
            try:
                has_begun = self._read(shard, link)
            except CommextError as error:
                self.uses.close(shard, failure_of(error, "request"))
            except Exception as error:  # noqa: BLE001 NIXL raises many types; only this shard failed
                self._retry(shard, link, error)
            else:
                if not has_begun:
                    peer.waiting.appendleft(shard)
                    return

    def _read(self, shard: ShardRead, link: Link) -> bool:
        if shard.use.failure is not None:
            self.uses.close(shard)
            return True
        if not link.serves(shard.remote.incarnation):
            self.uses.close(shard, restarted(shard.remote))
            return True
        if shard.remote.stream_row >= 0:
            self.uses.check_size(shard, link)
            self.streams.begin(shard, link)
            return True
        if shard.pairs is None or shard.pairs[0] is not link:
            self.uses.check_size(shard, link)
            shard.pairs = link, prepare(shard, link)
        pairs = shard.pairs[1]
        if not len(pairs.local):
            self.uses.close(shard)
        elif not self._reads.has_room(pairs, link):
            return False
        else:
            self._reads.post(shard, link, pairs)
        return True

    def _read_streams(self) -> None:
        for cursor in self.streams.due():
            shard, link = cursor.shard, cursor.link
            try:
                if shard.use.failure is not None:
                    self._end_stream(shard)
                    continue
                pairs = self.streams.advance(cursor)
                if pairs is None:
                    continue
                if not len(pairs.local):  # a stage that has no layer of this worker's
                    self.streams.note_posted(cursor)
                    if not self.streams.note_end(shard, None):
                        self.uses.close(shard)
                elif self._reads.has_room(pairs, link):
                    self._reads.post(shard, link, pairs)
                    self.streams.note_posted(cursor)
            except Exception as error:  # noqa: BLE001 NIXL raises many types; only this shard failed
                failure = failure_of_stream(error)
                if failure.reason in ("timeout", "transfer"):
                    self._peers.doubt(link, broken=failure.reason == "transfer")
                self._end_stream(shard, failure)

    def _end_stream(self, shard: ShardRead, failure: Failure | None = None) -> None:
        self.streams.leave(shard)
        self.uses.close(shard, failure)

    def _retry(self, shard: ShardRead, link: Link, error: Exception) -> None:
        """A peer that cannot be reached may have been restarted: ask it once more."""
        self._peers.doubt(link, broken=True)
        if shard.retried:
            self.uses.close(shard, Failure("transfer", ProtocolError(str(error))))
            return
        shard.retried = True
        logger.info("prefill engine %s: %s; connecting anew", link.key, error)
        self._guard("retry", lambda: self._recorder.count(retries=1))
        self._start(shard)

    def _go_on_reading(self) -> bool:
        end, num_moves = time.monotonic() + BUSY_SECONDS, self._reads.num_moves
        while self.poll_reads() and time.monotonic() < end:
            pass
        return self._reads.num_moves > num_moves

    def poll_reads(self) -> bool:
        num_moves = self._reads.num_moves
        for read in self._reads.under_way():
            end = self._reads.look(read)
            if end is not None:
                self._end_read(read, end)
        self.streams.poll_left()
        self._note_late()
        self._peers.sweep()
        return self._reads.num_moves > num_moves

    def _end_read(self, read: BlockRead, end: End) -> None:
        if end.failure is None and not read.shard.use.is_given_up:
            self._guard("record", lambda: self._reads.record(read))
        if end.failure is not None and end.failure.reason == "transfer":
            self._peers.doubt(read.link, broken=True)
        if read.shard.cursor is None or not self.streams.note_end(read.shard, end.failure):
            self.uses.close(read.shard, end.failure)

    def _note_late(self) -> None:
        for read in self._reads.take_late():
            use = read.shard.use
            self._peers.doubt(read.link, broken=False)
            if use.lateness is not None or use.is_given_up:
                continue
            use.lateness = self._lateness(is_closed=read.link.closed)
            self._outcomes.note(use.request_id, "late")
            self._log.warning(
                "late",
                f"request {use.request_id}: the read from prefill engine {read.link.key} is not "
                f"done: {use.lateness.error}; it fails as soon as its blocks are out of use",
            )
        now, limit = time.perf_counter(), self._config.transfer_timeout
        for peer in self._peers.waiting():
            if peer.link is None or now - peer.link.progressed < limit:
                continue
            # What has come a moment ago is tried: else it would not have had its time.
            while peer.waiting and now - peer.waiting[0].begun >= limit / 2:
                self.uses.close(peer.waiting.popleft(), self._lateness(is_closed=False))

    def _lateness(self, *, is_closed: bool) -> Failure:
        if is_closed:
            return Failure("transfer", ProtocolError("the prefill engine has gone or restarted"))
        text = f"nothing has arrived for {self._config.transfer_timeout:g} s"
        return Failure("timeout", CommextTimeoutError(text))

    def give_up(self, request_id: str) -> None:
        """End a late load; its reads may go on, into blocks that the scheduler keeps out of use."""
        use = self.uses.get(request_id)
        if use is None or use.load is None:
            self._outcomes.note(request_id, "settled")
            return
        given_up = Failure("timeout", CommextTimeoutError("given up by the scheduler"))
        failure = use.lateness or given_up
        use.failure = use.failure or failure
        use.is_given_up = True
        self.uses.report(use.load, failure, use.num_read)
        for shard in self._peers.withdraw(use) + self.streams.withdraw(use):
            self.uses.close(shard, failure)

    def _guard(self, what: str, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:  # noqa: BLE001 nothing depends on it
            self._log.warning(what, f"an error in the connector's own code: {error!r}")


BACK_OFF = BackOff()
MAX_FAILURES = 80
"""With the intervals of ``BACK_OFF`` some ten minutes: a large model takes as long to load."""


class Preconnect:
    """Prefill engines that configuration names, until they have answered.  Owned by one thread.

    Each is asked who it is, and its workers are connected to as for a request, so that the first
    one finds them ready.  An engine that starts later is asked again, for some ten minutes.

    Args:
        on_found: given the host and port of a side channel as the engine's requests will name them,
            the engine's incarnation and its first worker; once for each.
    """

    def __init__(
        self,
        client: SideChannelClient,
        config: ConnectorConfig,
        on_found: Callable[[str, int, str, WorkerDescription], None],
    ) -> None:
        self._client = client
        self._seconds = config.handshake_timeout
        self._on_found = on_found
        addresses = [parse_address(text) for text in dict.fromkeys(config.peers)]
        self._channels = {
            SideChannel(client, address, BACK_OFF) for address in addresses if address is not None
        }
        for channel in self._channels:
            self._ask(channel)

    def __len__(self) -> int:
        return len(self._channels)

    def _ask(self, channel: SideChannel) -> None:
        channel.ask(
            wire.DescribeRequest(engine_id="", tp_rank=0),
            self._seconds,
            partial(self._note_reply, channel),
            partial(self._note_error, channel),
        )

    def _note_reply(self, channel: SideChannel, reply: wire.Described) -> None:
        first = open_description(reply)
        host, port = channel.address
        self._on_found(reply.host or host, reply.port or port, reply.incarnation, first)
        self._forget(channel)

    def _note_error(self, channel: SideChannel, error: CommextError) -> None:
        host, port = channel.address
        if channel.num_failures >= MAX_FAILURES:
            logger.warning(
                "peers: %s:%d has not answered %d times and is asked no more; its first request "
                "connects to it: %s",
                *(host, port, channel.num_failures, error),
            )
            self._forget(channel)
            return
        if channel.num_failures == 1:
            logger.info("peers: %s:%d does not answer yet, is asked again: %s", host, port, error)
        self._client.after(channel.retry_at - time.monotonic(), partial(self._ask, channel))

    def _forget(self, channel: SideChannel) -> None:
        channel.close()
        self._channels.discard(channel)
