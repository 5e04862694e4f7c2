# SPDX-License-Identifier: Apache-2.0
"""A modelled engine: a prefix cache of so many blocks, a queue of prompts, a batch that decodes.

An engine runs steps, one after another. A step decodes one token of every running request. While
prompts are computed, a step also has a chunk of at most `chunk_tokens` of their tokens, first come,
first served, and takes as much longer. Requests enter between two steps, when there are blocks for
prompt and answer, and keep these until they end. Blocks that no request holds stay cached until
they are needed; the least recently used go first.

Steps that only decode are taken many at a time, up to the next request that ends or comes. So the
work of a simulation grows with requests and chunks, not with tokens.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import msgspec

from kvferry.errors import DescriptionError
from kvferry.router.choice import EngineView, NotNegative, Positive, Rate, Role, Source
from kvferry.simulate.trace import TraceRequest

MEASURED = Path(__file__).parent / "h200-8b.json"
# An engine keeps a prompt so long for the engine that decodes it; then that one computes it. Two
# full engines may wait for each other's blocks until the router's `first_byte_seconds` are over.
HOLD_SECONDS = 300.0


class StepTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step that decodes: for itself, for each request, for each token of their contexts."""

    fixed_seconds: NotNegative
    request_seconds: NotNegative = 0.0
    context_token_seconds: NotNegative = 0.0


class CopyCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fixed_seconds: NotNegative
    bytes_per_second: Positive


class EngineRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of rates: what one engine costs. All engines of a simulation are equal."""

    bytes_per_token: Positive
    cache_bytes: Positive  # for KV cache
    prefill: Rate
    step: StepTime
    transfer: CopyCost  # from engine to engine
    pool: CopyCost | None = None
    chunk_tokens: Annotated[int, msgspec.Meta(gt=0)] = 8192  # vLLM's max_num_batched_tokens
    most_running: Annotated[int, msgspec.Meta(gt=0)] = 256  # vLLM's max_num_seqs
    router_seconds: NotNegative = 0.0  # of each request, before and beside its engines
    about: str = ""
    command: str = ""  # that measured them

    def copy_rate(self, cost: CopyCost) -> Rate:
        return Rate(cost.fixed_seconds, self.bytes_per_token / cost.bytes_per_second)


def read_rates(path: Path = MEASURED) -> EngineRates:
    """Raises DescriptionError that says what is wrong."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=EngineRates)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise DescriptionError(
            f"cannot read the rates {path}: {why}; {MEASURED} is a file to start from"
        ) from None


class VirtualClock:
    """Events in order of time; of equal times, the first that was planned comes first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0

    def at(self, seconds: float, call: Callable[[], None]) -> None:
        self._planned += 1
        heapq.heappush(self._events, (max(seconds, self.now), self._planned, call))

    def run(self) -> None:
        """Until nothing is planned."""
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()


class PrefixCache:
    """The blocks of one engine: held by requests (named or not), cached, or free."""

    def __init__(self, most_blocks: int) -> None:
        self.most = most_blocks
        self._pins: Counter[int] = Counter()  # named blocks that requests hold
        self._idle: OrderedDict[int, None] = OrderedDict()  # named blocks that no request holds
        self._unnamed = 0  # held blocks whose content is not there, or not to be found

    @property
    def free_share(self) -> float:
        return 1 - (len(self._pins) + self._unnamed) / self.most

    def leading(self, blocks: Sequence[int]) -> int:
        held = takewhile(lambda block: block in self._pins or block in self._idle, blocks)
        return sum(1 for _ in held)

    def take(self, hits: Sequence[int], new: int) -> bool:
        """Hold cached blocks, and `new` empty ones. False: there is no room, nothing is taken."""
        woken = sum(block in self._idle for block in hits)
        if len(self._pins) + self._unnamed + woken + new > self.most:
            return False
        for block in hits:
            self._idle.pop(block, None)
            self._pins[block] += 1
        self._unnamed += new
        while len(self._pins) + len(self._idle) + self._unnamed > self.most:
            self._idle.popitem(last=False)
        return True

    def name(self, blocks: Sequence[int]) -> list[int]:
        """Held blocks have their content now. Returns those that others find here from now on.

        A block that another request computed meanwhile stays unnamed: it is there twice.
        """
        named = [b for b in blocks if b not in self._pins and b not in self._idle]
        for block in named:
            self._pins[block] = 1
        self._unnamed -= len(named)
        return named

    def release(self, held: Sequence[int], unnamed: int) -> None:
        """A request lets go. Its last blocks are the first to be evicted, as in vLLM."""
        self._unnamed -= unnamed
        for block in reversed(held):
            self._pins[block] -= 1
            if not self._pins[block]:
                del self._pins[block]
                self._idle[block] = None


class ModelledPool:
    """A pool that all engines share: blocks, the least recently used go first."""

    def __init__(self, most_blocks: int) -> None:
        self._most = most_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def leading(self, blocks: Sequence[int]) -> int:
        return sum(1 for _ in takewhile(self._blocks.__contains__, blocks))

    def put(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request on its way."""

    request: TraceRequest
    decode: ModelledEngine
    prefill: ModelledEngine | None  # None: computed where it is decoded
    expected_seconds: float = math.nan  # to the first token, if the policy said so
    first_token: float = math.nan  # when
    ended: float = math.nan  # when; nan: refused
    refused: bool = False
    cached_tokens: int = 0  # that were not computed
    source: Source = "none"
    held: dict[ModelledEngine, _Blocks] = field(default_factory=dict)
    kept: bool = False  # its computed prompt waits for room on the engine that decodes it
    left: int = 0  # tokens to compute, once it is admitted
    queued_work: float = 0.0  # in its engine's `waiting_work`

    @property
    def computed_on(self) -> ModelledEngine:
        return self.prefill or self.decode


@dataclass(slots=True)
class _Blocks:
    """What a request holds of one engine's cache."""

    named: list[int]
    unnamed: int


@dataclass(slots=True)
class _Steps:
    """Steps under way that only decode."""

    begun: float
    seconds: float  # each
    count: int


class Gaps:
    """Seconds between two tokens of a stream, to 10 microseconds, and how often they were seen."""

    def __init__(self) -> None:
        self._counts: Counter[float] = Counter()

    def add(self, seconds: float, count: int) -> None:
        self._counts[round(seconds, 5)] += count

    def percentile(self, share: float) -> float:
        """nan without gaps."""
        wanted = share * self._counts.total()
        for seconds in sorted(self._counts):
            wanted -= self._counts[seconds]
            if wanted <= 0:
                return seconds
        return math.nan


class ModelledEngine:
    """One engine. `ended` is called with each job that it ends or refuses."""

    def __init__(
        self,
        name: str,
        roles: frozenset[Role],
        rates: EngineRates,
        block_tokens: int,
        cache: PrefixCache,
        pool: ModelledPool | None,
        clock: VirtualClock,
        gaps: Gaps,
        ended: Callable[[SimulatedRequest], None],
    ) -> None:
        self.name, self.roles = name, roles
        self.cache = cache
        self.assigned = 0  # jobs that decode here, or will
        self._prefills = 0  # jobs that are computed here and decode elsewhere
        self.busy_seconds = 0.0
        self.computed_tokens = 0
        self._rates, self._prefill = rates, rates.prefill
        self._transfer = rates.copy_rate(rates.transfer)
        self._load = rates.copy_rate(rates.pool) if pool and rates.pool else None
        self._block_tokens, self._pool = block_tokens, pool
        self._clock, self._gaps, self._ended = clock, gaps, ended
        self._waiting: deque[SimulatedRequest] = deque()  # for blocks
        self._computing: deque[SimulatedRequest] = deque()
        self._loading = 0  # jobs whose prompts come from another engine or the pool
        self._joining: list[SimulatedRequest] = []  # from the next step on, they run
        self._running: list[tuple[int, int, SimulatedRequest]] = []  # heap: its end, tie, request
        self._context_tokens = 0
        self._step = 0  # so many are over
        self._tie = 0
        self._waiting_work = 0.0
        self._chunk_begun: float | None = None  # while a step with a chunk is under way
        self._chunk_work = 0.0
        self._steps: _Steps | None = None
        self._link_free = self._pool_free = 0.0  # when

    @property
    def load(self) -> int:
        """Requests that this engine computes or decodes, or will."""
        return self.assigned + self._prefills

    def view(self) -> EngineView:
        """The engine as a router would know it."""
        work = self._waiting_work
        if self._chunk_begun is not None:
            done = (self._clock.now - self._chunk_begun) / self._prefill.token_seconds
            work -= min(done, self._chunk_work)
        running = len(self._running)
        mean_context = self._context_tokens / running if running else 0
        return EngineView(
            name=self.name,
            roles=self.roles,
            waiting_tokens=max(0, round(work)),
            running=max(0, self.assigned - len(self._waiting)),
            waiting=len(self._waiting),
            cache_tokens=self.cache.most * self._block_tokens,
            prefill=self._prefill,
            step_seconds=self._step_seconds(running, self._context_tokens),
            free_blocks=self.cache.free_share,
            step_growth_seconds=self._step_seconds(1, mean_context) - self._step_seconds(0, 0),
            receive=self._transfer,
            pool=self._load,
        )

    def submit(self, job: SimulatedRequest) -> None:
        """A prompt to compute here."""
        self._prefills += job.prefill is not None
        hit = self.cache.leading(job.request.blocks) * self._block_tokens
        self._set_work(job, self._prefill.work(job.request.tokens - hit, hit))
        self.receive(job)

    def receive(self, job: SimulatedRequest) -> None:
        """A prompt that another engine has computed, or that is to be computed here."""
        if self._needed(job) <= self.cache.most:
            self._waiting.append(job)
            self._wake()
            return
        job.refused = True
        if self is job.prefill:
            self._prefills -= 1
        self._end(job)

    # Entering

    def _needed(self, job: SimulatedRequest) -> int:
        tokens = job.request.tokens
        if self is job.decode:
            tokens += job.request.output_tokens
        return math.ceil(tokens / self._block_tokens)

    def _wake(self) -> None:
        """Begin a step, or let the steps under way end early."""
        if self._steps is not None:
            begun, each, count = self._steps.begun, self._steps.seconds, self._steps.count
            over = math.ceil((self._clock.now - begun) / each - 1e-9)
            if over < count and count > 1:  # of a single step, jobs may wait for their first token
                self._plan_steps(_Steps(begun, each, over))
        elif self._chunk_begun is None:
            self._begin()

    def _begin(self) -> None:
        """Between two steps."""
        while self._waiting and self._admit(self._waiting[0]):
            self._waiting.popleft()
        for job in self._joining:
            self._run(job, job.request.output_tokens)
        fresh, self._joining = len(self._joining), []
        if self._computing:
            self._begin_chunk(fresh)
        elif self._running:
            until = 1 if fresh else self._running[0][0] - self._step
            context = self._context_tokens + len(self._running) * until / 2
            each = self._step_seconds(len(self._running), context)
            self._plan_steps(_Steps(self._clock.now, each, until), fresh)

    def _admit(self, job: SimulatedRequest) -> bool:
        """Give a job blocks, and begin what it needs. False: there is no room yet."""
        busy = len(self._running) + len(self._joining) + len(self._computing) + self._loading
        if busy >= self._rates.most_running:
            return False
        request = job.request
        hit = self.cache.leading(request.blocks)
        if not self.cache.take(request.blocks[:hit], self._needed(job) - hit):
            return False
        job.held[self] = _Blocks(list(request.blocks[:hit]), self._needed(job) - hit)
        local = min(hit * self._block_tokens, request.tokens - 1)
        if self is not job.computed_on:
            job.kept = False
            self._link_free = self._copied(
                self._link_free, self._transfer, request.tokens - local, self._received, job
            )
            return True
        job.cached_tokens, job.source = local, "local" if local else "none"
        if self._pool is not None and self._load is not None:
            stored = self._pool.leading(request.blocks) * self._block_tokens
            stored = min(stored, request.tokens - 1)
            load = self._load.seconds(stored - local)
            saved = self._prefill.seconds(request.tokens - local, local)
            saved -= self._prefill.seconds(request.tokens - stored, stored)
            if stored > local and load < saved:
                job.cached_tokens, job.source = stored, "pool"
                self._set_work(job, self._prefill.work(request.tokens - stored, stored))
                self._pool_free = self._copied(
                    self._pool_free, self._load, stored - local, self._loaded, job
                )
                return True
        self._compute(job)
        return True

    def _copied(
        self,
        free: float,
        rate: Rate,
        tokens: int,
        then: Callable[[SimulatedRequest], None],
        job: SimulatedRequest,
    ) -> float:
        """Plan a copy on a link that is free at some time. Returns when it is free again."""
        self._loading += 1
        end = max(free, self._clock.now) + rate.token_seconds * tokens
        self._clock.at(end + rate.fixed_seconds, lambda: then(job))
        return end

    def _received(self, job: SimulatedRequest) -> None:
        self._loading -= 1
        self._name(job)
        if job.prefill is not None:
            job.prefill._let_go(job)
        self._joining.append(job)
        self._wake()

    def _loaded(self, job: SimulatedRequest) -> None:
        self._loading -= 1
        self._compute(job)
        self._wake()

    def _compute(self, job: SimulatedRequest) -> None:
        job.left = job.request.tokens - job.cached_tokens
        self._set_work(job, self._prefill.work(job.left, job.cached_tokens))
        self._computing.append(job)

    # Steps

    def _begin_chunk(self, fresh: int) -> None:
        room = max(1, self._rates.chunk_tokens - len(self._running))
        parts: list[tuple[SimulatedRequest, int]] = []
        work = 0.0
        for job in self._computing:
            tokens = min(room, job.left)
            work += self._prefill.work(tokens, job.request.tokens - job.left)
            parts.append((job, tokens))
            room -= tokens
            if not room:
                break
        prefill = self._prefill.fixed_seconds + self._prefill.token_seconds * work
        decode = self._step_seconds(len(self._running), self._context_tokens)
        # One pass over the weights serves both.
        seconds = decode + max(0.0, prefill - self._rates.step.fixed_seconds)
        self._chunk_begun, self._chunk_work = self._clock.now, work
        self._clock.at(self._clock.now + seconds, lambda: self._end_chunk(parts, seconds, fresh))

    def _end_chunk(
        self, parts: list[tuple[SimulatedRequest, int]], seconds: float, fresh: int
    ) -> None:
        self._chunk_begun = None
        self.busy_seconds += seconds
        self._stepped(1, seconds, fresh)
        for job, tokens in parts:
            self.computed_tokens += tokens
            done = job.request.tokens - job.left
            self._set_work(job, job.queued_work - self._prefill.work(tokens, done))
            job.left -= tokens
            if job.left:
                continue  # the last of the chunk
            self._computing.popleft()
            self._set_work(job, 0.0)
            self._name(job)
            if self._pool is not None:
                self._pool.put(job.request.blocks)
            if job.prefill is None:
                job.first_token = self._clock.now
                self._run(job, job.request.output_tokens - 1)
            else:
                self._prefills -= 1
                if job.source == "local":
                    job.source = "handover"
                self._keep(job)
        self._retire()
        self._begin()

    def _plan_steps(self, steps: _Steps, fresh: int = 0) -> None:
        self._steps = steps

        def over() -> None:
            if self._steps is steps:
                self._steps = None
                self.busy_seconds += steps.seconds * steps.count
                self._stepped(steps.count, steps.seconds, fresh)
                self._retire()
                self._begin()

        self._clock.at(steps.begun + steps.seconds * steps.count, over)

    def _stepped(self, count: int, seconds: float, fresh: int) -> None:
        """So many steps are over. `fresh` jobs got their first token in the first of them."""
        running = len(self._running)
        self._step += count
        self._context_tokens += count * running
        if count and running:
            self._gaps.add(seconds, count * running - fresh)
            for _, _, job in self._running if fresh else ():
                if math.isnan(job.first_token):
                    job.first_token = self._clock.now

    def _run(self, job: SimulatedRequest, tokens: int) -> None:
        self._tie += 1
        heapq.heappush(self._running, (self._step + tokens, self._tie, job))
        self._context_tokens += job.request.tokens

    def _retire(self) -> None:
        while self._running and self._running[0][0] <= self._step:
            _, _, job = heapq.heappop(self._running)
            made = job.request.output_tokens - (1 if job.prefill is None else 0)
            self._context_tokens -= job.request.tokens + made
            self._end(job)

    def _step_seconds(self, running: int, context_tokens: float) -> float:
        cost = self._rates.step
        seconds = cost.fixed_seconds + cost.request_seconds * running
        return seconds + cost.context_token_seconds * context_tokens

    # Leaving

    def _keep(self, job: SimulatedRequest) -> None:
        """Keep a computed prompt until the engine that decodes it has room, or gives up."""
        job.kept = True

        def expire() -> None:
            if job.kept:
                job.kept = False
                job.prefill, job.source, job.cached_tokens = None, "none", 0
                self._let_go(job)

        self._clock.at(self._clock.now + HOLD_SECONDS, expire)
        job.decode.receive(job)

    def _name(self, job: SimulatedRequest) -> None:
        """A job's prompt is in this engine's cache."""
        held = job.held[self]
        named = self.cache.name(job.request.blocks[len(held.named) :])
        held.named += named
        held.unnamed -= len(named)

    def _let_go(self, job: SimulatedRequest) -> None:
        held = job.held.pop(self, None)
        if held is not None:
            self.cache.release(held.named, held.unnamed)
            self._wake()

    def _end(self, job: SimulatedRequest) -> None:
        self._set_work(job, 0.0)
        job.ended = math.nan if job.refused else self._clock.now
        for engine in list(job.held):
            held = job.held.pop(engine)
            engine.cache.release(held.named, held.unnamed)
            if engine is not self:
                engine._wake()
        job.decode.assigned -= 1
        self._ended(job)

    def _set_work(self, job: SimulatedRequest, work: float) -> None:
        self._waiting_work += work - job.queued_work
        job.queued_work = work
