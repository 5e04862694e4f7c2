# SPDX-License-Identifier: Apache-2.0
"""The hand-over between two engines: tickets, holds, producers and consumers.

Reading order: `ticket`, then the prefill side (`producer`, `holds`, `push`), then the decode side
(`consumer`, `load`, `peers`, `renew`). The docstrings of `producer` and `load` say what happens
when a process dies or stalls.
"""
