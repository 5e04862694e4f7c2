"""The scheduler's side: tickets out (`offering`), tickets in (`asking`), and orders for workers.

What both share lives here: the directory, which is reachable from the start and answers when the
workers have described themselves; the orders of the next step; the engine's incarnation, which
changes when vLLM resets its caches (new weights, sleep): all holds are withdrawn, all tickets void.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from kvferry.errors import DescriptionError
from kvferry.handover.producer import Directory
from kvferry.handover.renew import Renewer
from kvferry.handover.ticket import MARK, after_reset, child
from kvferry.net.messages import EngineInfo, RankInfo
from kvferry.net.names import at_port, is_loopback
from kvferry.net.rpc import Sockets
from kvferry.pool.weights import Adapters, adapter_settings
from kvferry.vllm.bootstrap import Bootstrap, Registration, Rendezvous, Whereabouts
from kvferry.vllm.config import FerryConfig, incarnation
from kvferry.vllm.consuming import Consuming
from kvferry.vllm.fingerprint import Prompts
from kvferry.vllm.metadata import FerryHandshake, FerryMetadata
from kvferry.vllm.metrics import FerryStats, Spans
from kvferry.vllm.multiconnector import Family
from kvferry.vllm.producing import PrefillCut, Producing

log = logging.getLogger("kvferry")

# Where workers of in-tree decode engines would connect. It is no address: they fail at once, and
# log it, where they would wait eight minutes for a server that does not answer them.
NOT_FOR_OTHERS = "kvferry://run kvferry's connector on both sides"

RENEWALS = 4  # of a lease; three may be lost before it runs out


class FerryScheduler:
    def __init__(
        self,
        config: FerryConfig,
        vllm_config: Any,
        family: Family,
        index: int,
        handed_over: PrefillCut,
    ) -> None:
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        self.config, self.handed_over = config, handed_over
        self._family, self._index = family, index
        style = family.styles[index]
        self.engine_id = str(transfer.engine_id)
        self.produces, self.consumes = transfer.is_kv_producer, transfer.is_kv_consumer
        self._first = child(incarnation(vllm_config), index)
        self._dp_rank = int(parallel.data_parallel_index)
        self._shape = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        self._orders = FerryMetadata()
        self._handshakes: dict[tuple[int, int], FerryHandshake] = {}
        self._described: tuple[EngineInfo, list[RankInfo]] | None = None
        self._levels: dict[str, int] = {}
        self.stats, self.spans = FerryStats(), Spans(vllm_config)
        self._sockets = Sockets(config.secret, config.admits)
        self._directory = Directory(self._sockets, host=config.host, port=config.port)
        self._directory.start()
        self._renewer: Renewer | None = None
        self._rendezvous = Rendezvous(config, self._sockets)
        self._prompts = prompts = Prompts.of(vllm_config)
        self._adapters = Adapters(adapter_settings(vllm_config), "are not handed over")
        self.asking = Consuming(
            config,
            style,
            self._rendezvous,
            handed_over,
            lambda: self._orders,
            self.stats,
            self.spans,
            prompts,
            self._adapters,
        )
        self.offering = Producing(
            config,
            self.engine_id,
            self._first,
            style,
            False,  # until workers have told what stands beside us, as beside any connector
            self._shape,
            self._directory.port,
            handed_over,
            lambda: self._orders,
            self.stats,
            self.spans,
            True,  # the same
            prompts,
            self._adapters,
        )
        self._bootstrap: Bootstrap | None = None
        self._registration: Registration | None = None
        if (config.bootstrap_port or config.bootstrap_server) and self.produces:
            self._open_bootstrap(parallel)
        log.info(
            "kvferry: engine %s offers its caches at port %d", self.engine_id, self._directory.port
        )

    def _open_bootstrap(self, parallel: Any) -> None:
        """Where Mooncake-style proxies ask. The first data-parallel rank's serves all, or the first
        of each host where every host has a front door of its own."""
        config, local = self.config, parallel.local_engines_only
        first = not (parallel.data_parallel_rank_local if local else self._dp_rank)
        if first and not config.bootstrap_server:
            self._bootstrap = Bootstrap(config.host, config.bootstrap_port, config.secret)
            log.info("kvferry: bootstrap at port %d", self._bootstrap.port)
        else:
            host = config.host or "127.0.0.1"
            if not local and not is_loopback(parallel.data_parallel_master_ip):
                host = parallel.data_parallel_master_ip
            server = config.bootstrap_server or at_port(host.strip("[]"), config.bootstrap_port)
            self._registration = Registration(
                server, self._dp_rank, config.secret, config.bootstrap_seconds
            )
        self._tell_bootstrap()

    def _tell_bootstrap(self) -> None:
        host = self.config.host or "127.0.0.1"
        where = (self.engine_id, host, self._directory.port, self.offering.incarnation)
        ranks = {
            tp: dict.fromkeys(range(self._shape[1]), NOT_FOR_OTHERS) for tp in range(self._shape[0])
        }
        entry = Whereabouts(*where).entry(ranks)
        if self._bootstrap is not None:
            self._bootstrap.put(self._dp_rank, entry)
        if self._registration is not None:
            self._registration.tell(entry)

    # What workers tell

    def described_by(self, handshakes: Iterable[FerryHandshake]) -> None:
        """Descriptions from workers under a MultiConnector, which come with their first step."""
        told = [(h, msgspec.msgpack.decode(h.rank, type=RankInfo)) for h in handshakes]
        self.add_handshakes({(rank.pp_rank, rank.tp_rank): h for h, rank in told})

    def add_handshakes(self, handshakes: Mapping[tuple[int, int], FerryHandshake]) -> None:
        """Workers' descriptions, by (pp_rank, tp_rank): when all are there, the engine is known."""
        self._handshakes.update(handshakes)
        if self._described is None and len(self._handshakes) == self._shape[0] * self._shape[1]:
            self._describe()

    def _describe(self) -> None:
        engines, ranks = [], []
        for _, handshake in sorted(self._handshakes.items()):
            engines.append(msgspec.msgpack.decode(handshake.engine, type=EngineInfo))
            ranks.append(msgspec.msgpack.decode(handshake.rank, type=RankInfo))
        first = engines[0]
        for engine, rank in zip(engines, ranks, strict=True):
            if engine != first:
                raise DescriptionError(
                    f"worker (pp {rank.pp_rank}, tp {rank.tp_rank}) describes the engine as "
                    f"{engine}, worker 0 as {first}"
                )
        told = self._handshakes.values()
        self.offering.flat = all(one.flat for one in told)
        self.offering.second = any(one.second for one in told)
        now = self.offering.incarnation  # a reset may have come first
        first = msgspec.structs.replace(first, incarnation=now)
        ranks = [msgspec.structs.replace(rank, incarnation=now) for rank in ranks]
        self._described = (first, ranks)
        self._directory.set_engine(first, ranks)
        self._rendezvous.introduce(first)
        self._renewer = Renewer(
            self._sockets, first, interval_seconds=self.config.lease_seconds / RENEWALS
        )
        self.asking.renew_by(self._renewer)

    # What vLLM tells

    def on_new_request(self, request: Any) -> None:
        self._prompts.name_media(request)
        self._adapters.ask(request)
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode") and self.produces and self._takes(params):
            self.offering.accept(request)
        wants = params.get("do_remote_prefill") or MARK in params
        if wants and self.consumes and self._takes(params):
            try:
                self.asking.arrived(request)
            except Exception:  # whatever a client's parameters are, the engine goes on
                log.exception("request %s: computed here", request.request_id)

    def finished(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over: whether its blocks stay, and what goes into its response."""
        self.asking.finished(request.request_id)
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_decode") or not self.produces or not self._takes(params):
            return False, None
        return self.offering.finished(request, block_ids)

    def _takes(self, params: Mapping[str, Any]) -> bool:
        return self._family.takes(self._index, params)

    def reset(self) -> None:
        """vLLM forgets all its caches; so must everybody who has a ticket."""
        new = after_reset(self._first)
        self.asking.reset()
        self.offering.incarnation = new
        self._orders.withdrawals += [hold.hold_id for hold in self._orders.holds]
        self._orders.incarnation = new
        if self._described is not None:
            engine, ranks = self._described
            engine = msgspec.structs.replace(engine, incarnation=new)
            ranks = [msgspec.structs.replace(rank, incarnation=new) for rank in ranks]
            self._directory.set_engine(engine, ranks)
        self._tell_bootstrap()
        log.info("kvferry: engine %s is reset: tickets from before are void", self.engine_id)

    @property
    def waits_for_a_step(self) -> bool:
        """Whether an idle engine should step: workers have something to hear, or to tell."""
        return self._orders.pending or self.asking.unsettled or not self._handshakes

    def take_orders(self) -> FerryMetadata:
        self.asking.settle()
        orders, self._orders = self._orders, FerryMetadata()
        return orders

    def take_stats(self) -> FerryStats | None:
        held = {"holds_open": len(self.offering.held), "held_blocks": self.offering.held_blocks}
        if held != self._levels:
            self._levels = held
            self.stats.level(f"{self._index}/scheduler", **held)
        return self.stats.take()

    def close(self) -> None:
        self.spans.close()
        self._adapters.close()
        self._rendezvous.close()
        if self._renewer is not None:
            self._renewer.close()
        for open_end in (self._registration, self._bootstrap):
            if open_end is not None:
                open_end.close()
        self._directory.close()
        self._sockets.close()
