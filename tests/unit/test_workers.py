"""Work that is accepted is done once; what is refused is never done, also where threads run out."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from kvferry.carriers.host import HostMemory
from kvferry.errors import Cancelled, HandoverError
from kvferry.handover.checksum import Summing
from kvferry.workers import Threads
from no_threads import no_threads
from waiting import wait_until

SECONDS = 10.0

STUCK = """
import contextlib, time
from kvferry.workers import Threads
from kvferry.handover.deadline import end_for_good
threads = Threads("stuck", 4)
threads.submit(lambda: end_for_good(lambda: time.sleep(0.05), contextlib.nullcontext))
time.sleep(0.1)
threads.close()
print("the end")
"""


def test_what_is_accepted_is_done_once_and_what_is_refused_never(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads, gate, done, over = Threads("few", 8), threading.Event(), [], threading.Event()
    with no_threads(monkeypatch, "few"), pytest.raises(HandoverError, match="no thread"):
        threads.submit(lambda: done.append("refused"))
    threads.submit(lambda: done.append(gate.wait(SECONDS)))
    with no_threads(monkeypatch, "few"):  # there is one, which does these in its turn
        threads.submit(lambda: done.append("queued"))
        threads.submit(lambda: done.append("after it"))
    assert caplog.text.count("can't start new thread; 1 threads do its work") == 1
    assert done == []
    gate.set()
    threads.submit(over.set)
    assert over.wait(SECONDS)
    threads.close()
    with pytest.raises(Cancelled):
        threads.submit(lambda: done.append("closed"))
    for thread in threading.enumerate():
        if thread.name.startswith("few"):
            thread.join(SECONDS)
    assert sorted(map(str, done)) == ["True", "after it", "queued"]  # a second thread may help


def test_each_has_a_thread_and_idle_ones_are_used_again() -> None:
    """As many as there is work at once, and no more; an error does not end one."""
    threads, meeting, names = Threads("some", 3), threading.Barrier(4), set[str]()

    def meet() -> None:
        names.add(threading.current_thread().name)
        meeting.wait(SECONDS)
        raise ValueError("a mistake of ours")

    for _ in range(5):
        for _ in range(3):
            threads.submit(meet)
        meeting.wait(SECONDS)
    assert names == {"some-0", "some-1", "some-2"}
    threads.close()


def test_lanes_share_threads_out_and_leave_some_to_newcomers() -> None:
    threads, gate, ran = Threads("lanes", 8), threading.Event(), []
    lock = threading.Lock()

    def wait(lane: str) -> None:
        with lock:
            ran.append(lane)
        gate.wait(SECONDS)

    def running(lane: str, count: int) -> bool:
        wait_until(lambda: ran.count(lane) >= count)
        return ran.count(lane) == count

    for lane, most in (("a", 4), ("b", 2), ("c", 1)):  # while it has fewer than are free
        for _ in range(20):
            threads.submit(lambda lane=lane: wait(lane), lane)
        assert running(lane, most) and threads.free
    threads.submit(lambda: wait("none"))  # work without a lane takes what there is
    assert running("none", 1) and not threads.free
    gate.set()
    assert all(running(lane, 20) for lane in "abc")  # each exactly once
    threads.close()


def test_lanes_of_one_thread_do_their_work_in_order() -> None:
    threads, done, over = Threads("single", 8, per_lane=1), [], threading.Event()
    for number in range(100):
        threads.submit(lambda number=number: done.append(number), "lane")
    threads.submit(over.set, "lane")
    assert over.wait(SECONDS) and done == list(range(100))
    threads.close()


def test_what_waits_in_a_lane_is_done_after_the_end() -> None:
    threads, gate, done = Threads("ending", 4), threading.Event(), threading.Semaphore(0)
    for _ in range(20):
        threads.submit(lambda: gate.wait(SECONDS) and done.release(), "lane")
    threads.close()
    gate.set()
    assert all(done.acquire(timeout=SECONDS) for _ in range(20))


def test_what_was_accepted_before_the_end_is_done() -> None:
    threads, gate, over = Threads("last", 1), threading.Event(), threading.Event()
    threads.submit(lambda: gate.wait(SECONDS) and None)
    threads.submit(over.set)
    threads.close()
    threads.close()
    gate.set()
    assert over.wait(SECONDS)


def test_a_process_ends_though_a_transfer_does_not() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STUCK], timeout=30, check=True, capture_output=True, text=True
    )
    assert ended.stdout == "the end\n"


def test_checksums_go_on_after_a_thread_did_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    summing, made = Summing(HostMemory([])), threading.Event()
    with no_threads(monkeypatch, "kvferry-sums"):
        assert not summing.submit(lambda memory: made.set())
        summing.close()
    summing = Summing(HostMemory([]))
    with no_threads(monkeypatch, "kvferry-sums"):
        assert not summing.submit(lambda memory: made.set())
    assert not made.is_set()
    assert summing.submit(lambda memory: made.set())
    assert made.wait(SECONDS)
    summing.close()


FORKED = """
import os, threading
from kvferry.workers import Threads
threads, gate = Threads("forked", 2), threading.Event()
assert threads.call(lambda: 3).result(10) == 3
stuck = threads.call(lambda: gate.wait(60))
child = os.fork()
if not child:
    assert threads.free == 2 and threads.call(lambda: 7).result(10) == 7
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
gate.set()
assert stuck.result(10)
"""


def test_a_forked_child_has_threads_of_its_own() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], timeout=30, check=True)


def test_a_lane_goes_on_after_a_call_that_was_given_up() -> None:
    threads, gate = Threads("lost", 1, per_lane=1, most_stuck=1), threading.Event()
    stuck = threads.call(lambda: gate.wait(SECONDS), "lane")
    wait_until(stuck.running)
    waiting = threads.call(lambda: True, "lane")
    assert threads.give_up(stuck)
    gate.set()
    assert waiting.result(SECONDS)
    threads.close()


def test_a_thread_that_is_given_up_ends_when_its_call_does() -> None:
    threads, gate = Threads("stuck", 1, most_stuck=1), threading.Event()
    calls = [threads.call(lambda: gate.wait(SECONDS)) for _ in range(2)]
    wait_until(calls[0].running)
    assert not threads.give_up(calls[1])  # it has not begun
    assert threads.give_up(calls[0]) and not threads.give_up(calls[0])
    wait_until(calls[1].running)  # on another thread
    assert not threads.give_up(calls[1]) and threads.stuck == 1  # too many
    gate.set()
    wait_until(lambda: not threads.stuck and threads.free == 1)
    threads.close()
    threads.join(SECONDS)
    assert not [t for t in threading.enumerate() if t.name.startswith("stuck")]
