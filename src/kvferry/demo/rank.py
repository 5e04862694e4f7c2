"""One rank of the demo, in a process of its own, which does what `kvferry.demo.orders` says."""

from __future__ import annotations

import signal
import traceback
from multiprocessing.connection import Connection

from kvferry.demo.consumer import Consumer
from kvferry.demo.memory import SharedFile
from kvferry.demo.orders import Done, Failed, Order, Progress
from kvferry.demo.producer import Producer
from kvferry.demo.work import Work
from kvferry.errors import KvferryError
from kvferry.layout.shape import Rank


def rank_main(
    work: Work,
    is_producer: bool,
    rank: Rank,
    fault: str,
    files: list[SharedFile],
    pipe: Connection,
) -> None:
    """Body of a rank's process. `files`: its own of a producer, of a consumer all producers'."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the demo itself decides, and closes the pipe
    descriptors = [file.descriptor for file in files]
    kind = Producer if is_producer else Consumer
    worker = kind(work, rank, fault, descriptors, lambda done: pipe.send(Progress(done)))
    while True:
        try:
            order: Order = pipe.recv()
        except (EOFError, ConnectionError):
            for carrier in worker.carriers:
                carrier.close()
            return
        answer: Done | Failed
        try:
            answer = Done(getattr(worker, order.name)(*order.arguments))
        except KvferryError as error:
            answer = Failed(error, str(error))
        except Exception:  # whoever gave the order raises it, with this text
            answer = Failed(None, traceback.format_exc())
        try:
            pipe.send(answer)
        except ConnectionError:
            return
