# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.engines`: real vLLM engines on one GPU, with kvferry and with its peers.

    pool       prefill while blocks are saved, and first tokens from the pool, beside vLLM's
               OffloadingConnector and an engine without a connector
    handover   first tokens on a decode engine, beside vLLM's NixlConnector, computing, and a hit in
               the engine's own prefix cache; and what a load does to another running request
    stream     mixed requests at rising rates through a prefill and a decode engine, beside NIXL and
               one engine alone
    start      what a connector adds to an engine's start, in several rounds

Each engine is a process of its own (`worker.py`), driven over a socket (`fleet.py`) and timed in
its own process. Engines of a part start together, and then only one is measured at a time.
"""
