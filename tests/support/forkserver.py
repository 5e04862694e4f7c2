"""The one server that processes of tests fork from: what they import is there already."""

from __future__ import annotations

import multiprocessing

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "kvferry.handover.consumer",
        "kvferry.handover.producer",
        "kvferry.demo.rank",
        "kvferry.carriers",
        "kvferry.cli.main",
        "kvferry.router.app",
    ]
)
