"""What is checked with the two engines of a cell, one check after another.

P has hand-over and pool, and saves all it computes. D has both too, but saves nothing (its role is
`kv_consumer`): so what D finds in the pool is P's. D computes all references before P has seen any
prompt, when the pool is empty.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gpu_engines.engine import Answer, Ask
from gpu_engines.entries import Entries, same_as_saved, same_entries
from gpu_engines.pair import Engine, EngineError, EngineLost

EPSILON = {"float32": 0.01, "bfloat16": 0.05}  # of log-probabilities, by the model's type
MOST_TOLERANCE = 0.7  # e^0.7 is 2: with more, only bytes prove something
TIMES_NOISE = 3
OUTPUT, LONG_OUTPUT = 12, 120
CROWD = 4  # requests of the check for preemption
FREE_SECONDS = 15.0  # for blocks to come back: less than a lease
TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


def prompt(seed: int, tokens: int) -> list[int]:
    seed = 1013 * seed + tokens  # no prompt is the beginning of another
    return [(seed * 7919 + i * (37 + seed)) % 500 + 3 for i in range(tokens)]


LENGTHS = {
    "short": 40,
    "middle": 333,
    "long": 700,  # more than a step computes: it comes in chunks
    "other": 333,
    "head": 500,
    "twice": 200,
    "stopped": 300,
    "pooled": 640,
}
DRAWN = 4  # prompts of each, of which the one is taken whose answer is the most certain
UNSEEN = prompt(99, 640)  # by P
HEAD_TOKENS = 210  # of the prompt "head", which D has computed already
CROWDED = [prompt(200 + i, 40) for i in range(CROWD)]


@dataclass
class Outcome:
    """Of one check."""

    name: str
    ok: bool
    seconds: float
    said: str = ""


@dataclass
class Pair:
    """Two engines, and what D says alone."""

    p: Engine
    d: Engine
    dtype: str
    exact: bool  # all tokens must be equal
    tokens: bool = True  # whether tokens are compared at all
    hits: bool = True  # whether D has a prefix cache
    pool: bool = True  # whether the pool keeps this model's caches
    grows: bool = True  # whether requests need more blocks as they go on
    samples: bool = True  # whether vLLM can sample twice
    tolerance: float = 0.0
    prompts: dict[str, list[int]] = field(default_factory=dict)
    alone: dict[str, Answer] = field(default_factory=dict)
    alone_crowded: list[Answer] = field(default_factory=list)
    crowd_peak: int = 0  # blocks that one of them uses at most

    def ticket(self, asked: list[int]) -> dict[str, Any]:
        """Prefill on P; what D needs to load it."""
        answer = self.p.one(asked, max_tokens=1, kv=dict(TO_DECODE))
        assert answer.kv and answer.kv.get("do_remote_prefill"), f"P gave no ticket: {answer}"
        return answer.kv

    def require_same(self, name: str, answer: Answer) -> None:
        if self.tokens:
            reference = self.alone[name]
            for sample in answer.tokens:
                mine = Answer(answer.request_id, [sample], answer.best)
                require_like(reference, mine, self.tolerance, exact=self.exact)

    def loaded(self) -> Entries:
        """What P held of its last request, and D loaded of its last one: compared."""
        held, got = self.p.remembered(), self.d.remembered()
        assert not got.failed, f"loads failed: {got.failed}"
        assert len(held.held) == 1 and len(got.loaded) == 1, (
            f"{len(held.held)} holds on P, {len(got.loaded)} loads on D"
        )
        assert not got.pool_loaded, "D loaded from the pool, with a ticket"
        (source,), (here,) = held.held.values(), got.loaded.values()
        assert same_entries(source, here) > 0
        return here

    def forget(self) -> None:
        """Both engines have nothing in their prefix caches, and nothing is remembered."""
        for engine in (self.p, self.d):
            engine.reset()
            engine.remembered()


def run_checks(pair: Pair) -> Iterator[Outcome]:
    """All of them. Those after a failed one run too, while both engines live."""
    checks: list[tuple[str, Callable[[Pair], str]]] = [("alone", check_alone)]
    checks += [("hand-over", check_hand_over), ("control", check_control)]
    checks += [("prefix", check_prefix)] if pair.hits else []
    checks += [("n=2", check_samples)] if pair.samples else []
    checks += [("at once", check_at_once)]
    checks += [("preemption", check_preemption)] if pair.grows else []
    checks += [("abort", check_abort)]
    checks += [("pool", check_pool)] if pair.pool else []
    for name, check in checks:
        began, ok, lost = time.monotonic(), False, False
        try:
            said, ok = check(pair), True
        except EngineLost as error:
            said, lost = str(error)[:600], True
        except (AssertionError, EngineError) as error:
            said = str(error)[:600]
        except Exception:  # a mistake of this harness is one check's, too
            said = traceback.format_exc(limit=-2)[-600:]
        yield Outcome(name, ok, time.monotonic() - began, said)
        if lost or len(pair.alone) < len(LENGTHS):
            return


def check_alone(pair: Pair) -> str:
    """D alone: the references, and how far D differs from itself."""
    d, names = pair.d, list(LENGTHS)
    pair.prompts = draw(d)
    d.reset()
    for name in names:
        pair.alone[name] = d.one(pair.prompts[name])
    d.reset()
    among = d.ask(*(Ask(pair.prompts[name]) for name in names)).answers
    again = d.ask(*(Ask(pair.prompts[name]) for name in names)).answers  # with prefix hits
    runs = [(pair.alone[name], run[i]) for i, name in enumerate(names) for run in (among, again)]
    repeats = all(one.tokens == other.tokens for one, other in runs)
    d.reset()
    if pair.grows:
        for one in CROWDED:
            got = d.ask(Ask(one, LONG_OUTPUT))
            pair.alone_crowded += got.answers
            pair.crowd_peak = max(pair.crowd_peak, got.peak_blocks)
        among = d.ask(*(Ask(one, LONG_OUTPUT) for one in CROWDED)).answers
        runs += zip(pair.alone_crowded, among, strict=True)
    noise = max(difference(one, other) for one, other in runs)
    pair.tolerance = max(TIMES_NOISE * noise, EPSILON[pair.dtype])
    hit = again[names.index("long")].cached
    assert hit or not pair.hits, "D does not hit what it computed"
    answers = [tuple(pair.alone[name].tokens[0]) for name in names]
    assert len(set(answers)) == len(names), "two prompts have one answer: tokens prove nothing"
    if pair.tokens and pair.exact and not repeats:
        pair.exact = False
        raise AssertionError(f"D alone does not repeat its own tokens (noise {noise:.2g})")
    if pair.tokens and pair.tolerance > MOST_TOLERANCE:
        pair.tokens = False
        return f"D differs from itself by {noise:.2g}: tokens are not compared"
    return f"noise {noise:.2g}"


def draw(engine: Engine) -> dict[str, list[int]]:
    """Prompts after which rounding is least likely to decide between two tokens."""
    drawn = [
        (name, prompt(DRAWN * number + i, tokens))
        for number, (name, tokens) in enumerate(LENGTHS.items())
        for i in range(DRAWN)
    ]
    answers = engine.ask(*(Ask(one) for _, one in drawn)).answers
    certain = [min(map(_lead, answer.tokens[0], answer.best)) for answer in answers]
    found: dict[str, list[int]] = {}
    for index in sorted(range(len(drawn)), key=lambda i: certain[i]):
        found[drawn[index][0]] = drawn[index][1]
    return found


def check_hand_over(pair: Pair) -> str:
    """Every entry that D loads is P's, and D's answer is the one of D alone."""
    pair.forget()
    compared = 0
    for name in ("short", "middle", "long", "other"):
        kv = pair.ticket(pair.prompts[name])
        answer = pair.d.one(pair.prompts[name], kv=kv)
        here = pair.loaded()
        compared += here.tokens
        pair.require_same(name, answer)
    return f"{compared} tokens"


def check_control(pair: Pair) -> str:
    """A ticket for another prompt is not used; and the comparisons can tell prompts apart."""
    pair.forget()
    kv = pair.ticket(pair.prompts["middle"])
    answer = pair.d.one(pair.prompts["other"], kv=kv)
    got, held = pair.d.remembered(), pair.p.remembered()
    assert not got.loaded, "D loaded the cache of another prompt"
    # D may load from the pool what P has saved of the prompt, and no more
    pair.require_same("other", answer)
    (middle,) = held.held.values()
    kv = pair.ticket(pair.prompts["other"])
    (other,) = pair.p.remembered().held.values()
    assert not _holds(lambda: same_entries(middle, other)), "two prompts have the same entries"
    if pair.tokens:
        one, two = pair.alone["middle"], pair.alone["other"]
        alike = _holds(lambda: require_like(one, two, pair.tolerance, exact=pair.exact))
        assert not alike, "two prompts pass for one"
    pair.d.one(pair.prompts["other"], kv=kv)
    pair.p.settled(FREE_SECONDS)  # of the first ticket too: D has let go of it
    return ""


def check_prefix(pair: Pair) -> str:
    """D has the head of a prompt already; then it hits what it has loaded."""
    pair.forget()
    asked = pair.prompts["head"]
    pair.d.one(asked[:HEAD_TOKENS], max_tokens=1)
    pair.d.remembered()
    answer = pair.d.one(asked, kv=pair.ticket(asked))
    here = pair.loaded()
    pair.require_same("head", answer)
    again = pair.d.one(asked)
    pair.require_same("head", again)
    if not here.states:  # of these, D has the last one only, and hits need one at a block's end
        assert again.cached > HEAD_TOKENS, f"{again.cached} tokens hit of what was loaded"
    return f"{here.first} tokens were there, {again.cached} hit again"


def check_samples(pair: Pair) -> str:
    """Two samples of one request share a ticket."""
    pair.forget()
    answer = pair.d.one(pair.prompts["twice"], n=2, kv=pair.ticket(pair.prompts["twice"]))
    got = pair.d.remembered()
    assert len(answer.tokens) == 2, f"{len(answer.tokens)} samples"
    assert got.loaded and not got.failed, f"{len(got.loaded)} loads, {len(got.failed)} failed"
    (source,) = pair.p.remembered().held.values()
    for here in got.loaded.values():
        same_entries(source, here)
    pair.require_same("twice", answer)
    return f"{len(got.loaded)} loads"


def check_at_once(pair: Pair) -> str:
    """Loads beside each other, and beside a prompt that D computes in chunks."""
    pair.forget()
    names = ["short", "middle", "long", "other"]
    asked = [Ask(pair.prompts[name], kv=pair.ticket(pair.prompts[name])) for name in names]
    sources = list(pair.p.remembered().held.values())
    answers = pair.d.ask(*asked, Ask(pair.prompts["pooled"])).answers
    got = pair.d.remembered()
    assert not got.failed and len(got.loaded) == len(names), f"{len(got.loaded)} loads"
    for source, answer in zip(sources, answers, strict=False):
        same_entries(source, got.loaded[answer.request_id])
    for name, answer in zip([*names, "pooled"], answers, strict=True):
        pair.require_same(name, answer)
    return f"{len(got.loaded)} loads"


def check_preemption(pair: Pair) -> str:
    """Requests are loaded, preempted as they grow, and still give the answers of D alone."""
    pair.forget()
    asked = [Ask(one, LONG_OUTPUT, kv=pair.ticket(one)) for one in CROWDED]
    sources = list(pair.p.remembered().held.values())
    # all of them fit as they come, and half of them as they end
    pair.d.call("leave_blocks", CROWD // 2 * pair.crowd_peak + 1)
    try:
        got = pair.d.ask(*asked)
    finally:
        pair.d.settled(FREE_SECONDS)
        pair.d.call("leave_blocks", 0)
    assert got.preemptions, "no request was preempted"
    seen = pair.d.remembered()
    assert not seen.failed, f"loads failed: {seen.failed}"
    for source, answer in zip(sources, got.answers, strict=True):
        same_entries(source, seen.loaded[answer.request_id])
    if pair.tokens:
        for reference, answer in zip(pair.alone_crowded, got.answers, strict=True):
            require_like(reference, answer, pair.tolerance, exact=False)  # see the docstring
    return f"{got.preemptions} preemptions"


def check_abort(pair: Pair) -> str:
    """Aborted before the load, after it, and while P computes: all blocks come back at once."""
    pair.forget()
    asked = pair.prompts["stopped"]
    for when in ({"abort_steps": 0}, {"abort_steps": 1}, {"abort_tokens": 2}):
        pair.d.one(asked, kv=pair.ticket(asked), **when)
        pair.d.settled(FREE_SECONDS)
        pair.p.settled(FREE_SECONDS)
    pair.p.reset()
    answer = pair.p.one(pair.prompts["long"], max_tokens=1, kv=dict(TO_DECODE), abort_steps=1)
    assert answer.ended == "abort" and not answer.kv, f"a ticket for an aborted prefill: {answer}"
    pair.p.settled(FREE_SECONDS)
    pair.forget()
    last = pair.d.one(asked, kv=pair.ticket(asked))
    pair.loaded()
    pair.require_same("stopped", last)
    return ""


def check_pool(pair: Pair) -> str:
    """P computes and saves a prompt; D loads it, and so does P when it has forgotten it."""
    pair.forget()
    asked = pair.prompts["pooled"]
    pair.p.one(asked)
    pair.forget()  # waits for the saves
    told = []
    for reader in (pair.d, pair.p):
        deadline = time.monotonic() + FREE_SECONDS
        while True:  # a lookup's answer is kept for a moment, and D has asked before
            answer = reader.one(asked)
            got = reader.remembered()
            if got.pool_loaded or time.monotonic() > deadline:
                break
            reader.reset()
        assert not got.failed, f"{reader.name}: loads failed: {got.failed}"
        assert got.pool_loaded, f"{reader.name} loaded nothing from the pool"
        ((_, here),) = got.pool_loaded.items()
        saved = pair.p.call("saved", here.names())
        assert same_as_saved(saved, here) > 0
        told.append(f"{reader.name} {here.tokens} tokens")
        if reader is pair.d:
            pair.require_same("pooled", answer)
    pair.d.one(UNSEEN)
    assert not pair.d.remembered().pool_loaded, "a prompt that nobody saved was loaded"
    return ", ".join(told)


def require_like(reference: Answer, answer: Answer, tolerance: float, *, exact: bool) -> None:
    """The rule of this package's docstring, for one answer."""
    mine, theirs = answer.tokens[0], reference.tokens[0]
    assert len(mine) == len(theirs), f"{len(mine)} tokens instead of {len(theirs)}"
    for place, (token, wanted) in enumerate(zip(mine, theirs, strict=True)):
        best = reference.best[place] if reference.best else {}
        if token != wanted:
            gap = best.get(wanted, 0.0) - best.get(token, float("-inf"))
            assert not exact and gap <= tolerance, (
                f"token {place} is {token} instead of {wanted}, which was better by {gap:.2g}"
            )
            return  # from here on the two go on from different tokens
        if best and answer.best:
            off = abs(best[wanted] - answer.best[place][token])
            assert off <= tolerance, (
                f"token {place}: its log-probability is off by {off:.2g}, more than {tolerance:.2g}"
            )


def difference(one: Answer, other: Answer) -> float:
    """The largest difference of log-probabilities, as far as both say the same."""
    most = 0.0
    pairs = zip(one.tokens[0], other.tokens[0], one.best, other.best, strict=False)
    for mine, theirs, best, others in pairs:
        if mine != theirs:
            # the other token was as good as this one, up to the difference: at least this much
            return max(most, best[mine] - min(best.values()))
        most = max(most, abs(best[mine] - others[mine]))
    return most


def _lead(token: int, best: dict[int, float]) -> float:
    """By how much a token was better than the next one."""
    return best[token] - max(lp for other, lp in best.items() if other != token)


def _holds(check: Callable[[], object]) -> bool:
    try:
        check()
    except AssertionError:
        return False
    return True
