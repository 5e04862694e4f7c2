# SPDX-License-Identifier: Apache-2.0
"""Where a request is served: expected seconds of every choice, and the cheapest of them.

Reading order: `model` (the records), `choose` (from a prompt and engines to a decision), `rates`
(what engines and links cost, learned from what is seen). Nothing here does I/O. The router and
`kvferry simulate` run the same code.
"""
