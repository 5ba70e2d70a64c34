"""Which engines there are: the union of what several sources name, changed while requests run."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from vllm_commext.errors import ConfigError
from vllm_commext.proxy.engines import Engine, EnginePool

logger = logging.getLogger("vllm.commext.proxy")


@dataclass(frozen=True, order=True)
class EngineEndpoint:
    """One engine as a source names it."""

    role: str
    url: str


class Registry:
    """Keeps the pools as the sources want them.

    An engine that no source names any more gets no new work and goes when its last request has
    ended. One that changes its role is a new engine in its new role from that moment on, while
    its old role ends in the same way. on_added, on_removed: told of each engine.
    """

    def __init__(self, pools: Mapping[str, EnginePool]) -> None:
        self._pools = pools
        self._named: dict[str, tuple[EngineEndpoint, ...]] = {}
        self._drained: frozenset[str] = frozenset()
        self.on_added: Callable[[Engine], None] = lambda _: None
        self.on_removed: Callable[[Engine], None] = lambda _: None

    @property
    def engines(self) -> list[Engine]:
        return [engine for pool in self._pools.values() for engine in pool.engines]

    def name(self, source: str, places: Iterable[EngineEndpoint]) -> None:
        """*source* names *places*, in this order, and no others any more.

        Raises `ConfigError`, and changes nothing, if an engine would have two roles: it cannot
        pull KV blocks from itself.
        """
        named = {**self._named, source: tuple(places)}
        if named == self._named:
            return
        urls = [place.url for place in {place for of in named.values() for place in of}]
        if both := sorted(url for url in set(urls) if urls.count(url) > 1):
            raise ConfigError(
                f"{both[0]} is given as a prefill and as a decode engine: an engine "
                "cannot pull KV blocks from itself; give each engine one role"
            )
        self._named = named
        self._reconcile()

    def drain(self, urls: frozenset[str]) -> None:
        """The engines at *urls*, and no others, get no new work though they are named."""
        self._drained = urls
        self._reconcile()

    def sweep(self) -> None:
        """Remove what is no longer named and has nothing left to do."""
        for pool in self._pools.values():
            for engine in pool.engines:
                if engine.leaving and engine.in_flight == 0:
                    pool.remove(engine)
                    self.on_removed(engine)
                    logger.info("%s (%s) is removed", engine.name, engine.url)

    def _reconcile(self) -> None:
        wanted = dict.fromkeys(place for places in self._named.values() for place in places)
        for pool in self._pools.values():
            known = {engine.url for engine in pool.engines}
            for place in wanted:
                if place.role == pool.role and place.url not in known:
                    engine = pool.add(place.url)
                    self.on_added(engine)
                    logger.info("%s (%s) is added", engine.name, engine.url)
            for engine in pool.engines:
                engine.leaving = EngineEndpoint(pool.role, engine.url) not in wanted
                engine.draining = engine.leaving or engine.url in self._drained
        self.sweep()
