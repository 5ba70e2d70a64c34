"""The ways in which the beginning of an answer comes to an engine that has not computed it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from tests.contract.scheduled_core import (
    Core,
    answer_to,
    has_ended,
    prefilled,
    request_of,
    turn_until,
)
from tests.kit.descriptions import description
from tests.kit.ports import free_port
from vllm_commext.nixl.first_token import FirstToken
from vllm_commext.nixl.identity import Identity
from vllm_commext.nixl.prefill.side_channel import SideChannelServer
from vllm_commext.nixl.stream.producer import StreamDirectory
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.params import write_place
from vllm_commext.nixl.wire.prompt import digests

HOST = "127.0.0.1"
KEY = "0123456789abcdef" * 2
TO_STREAM = {"do_remote_decode": True, "do_remote_prefill": False, "stream_key": KEY}
PROMPT = list(range(40))
WHOLE = answer_to(PROMPT, 40)
FIRST = WHOLE[0]
MakeCore = Callable[..., Core]


class Channel:
    """A prefill engine's side channel."""

    def __init__(self, secret: bytes | None = None) -> None:
        self.port = free_port(HOST)
        self.directory = StreamDirectory()
        self._place = write_place(HOST, self.port, secret)
        described = {0: description("p")}
        self._server = SideChannelServer(
            "p", "start-1", HOST, self.port, described, secret, streams=self.directory
        )

    def begin(self, tokens: list[int], **changes: Any) -> None:
        prompt = digests(Identity().prompt_of(request_of("there", tokens)), len(tokens))
        values: dict[str, Any] = {
            "request_id": "there",
            "num_tokens": len(tokens),
            "row": 3,
            "tag": 77,
            "fence_slot": 5,
            "fence_nonce": 77,
            "prompt": prompt,
            "regions": [0],
        }
        self.directory.open(KEY, wire.FoundStream(**{**values, **changes}))

    @property
    def params(self) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "stream_key": KEY,
            **{f"remote_{name}": self._place[name] for name in ("host", "port")},
            "remote_place_seal": self._place["seal"],
        }

    def close(self) -> None:
        self._server.close()


def offered(make_core: MakeCore, **sampling: Any) -> tuple[int, str]:
    """What a prefill engine says of the prompt's first token."""
    params = prefilled(make_core("kv_producer"), PROMPT, **sampling)
    return params["remote_first_token"], params["remote_sampling"]


def begin(decode: Core, channel: Channel, **sampling: Any) -> None:
    """Add a request, up to its load, which does not end yet."""
    decode.worker.holds_loads = True
    decode.add(request_of("d", PROMPT, channel.params, **sampling))
    channel.begin(PROMPT)
    turn_until(decode, lambda: bool(decode.worker.loads))


def end_load(decode: Core) -> None:
    decode.worker.holds_loads = False
    turn_until(decode, lambda: has_ended(decode, "d"))


def prompts_of(decode: Core) -> Any:
    return decode.scheduler.get_kv_connector().scheduler_side.prompts  # pyright: ignore


def single_answer(make_core: MakeCore, **sampling: Any) -> Any:
    single = make_core()
    single.add(request_of("d", PROMPT, None, **sampling))
    single.run("d")
    return single.answer("d")


class Arrival(NamedTuple):
    """One way; ``bring`` has it bring ``num_begun`` tokens of request "d" to a core."""

    bring: Callable[..., None]
    role: str
    num_begun: int
    way: FirstToken


def _by_parameters(
    make_core: MakeCore, channel: Channel, core: Core, begun: list[int], **sampling: Any
) -> None:
    params = prefilled(make_core("kv_producer"), PROMPT, **sampling)
    assert params["remote_first_token"] == FIRST
    params["remote_first_token"] = begun[0]
    core.add(request_of("d", PROMPT, params, **sampling))


def _by_stream(
    make_core: MakeCore, channel: Channel, core: Core, begun: list[int], **sampling: Any
) -> None:
    first, digest = offered(make_core, **sampling)
    assert first == FIRST
    begin(core, channel, **sampling)
    channel.directory.tell(KEY, begun[0], digest)


def _by_answer(
    make_core: MakeCore, channel: Channel, core: Core, begun: list[int], **sampling: Any
) -> None:
    params = prefilled(make_core("kv_producer"), PROMPT)
    core.add(request_of("d", PROMPT, {**params, "answer_token_ids": begun}, **sampling))


def _by_answer_alone(
    make_core: MakeCore, channel: Channel, core: Core, begun: list[int], **sampling: Any
) -> None:
    core.add(request_of("d", PROMPT, {"answer_token_ids": begun}, **sampling))


ARRIVALS = {
    "parameters": Arrival(_by_parameters, "kv_consumer", 1, FirstToken.PREFILL),
    "stream": Arrival(_by_stream, "kv_consumer", 1, FirstToken.PREFILL),
    "answer": Arrival(_by_answer, "kv_both", 9, FirstToken.RESUMED),
    "answer, prompt not read": Arrival(_by_answer_alone, "kv_producer", 1, FirstToken.RESUMED),
}
