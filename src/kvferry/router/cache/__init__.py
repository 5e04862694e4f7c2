# SPDX-License-Identifier: Apache-2.0
"""What the engines' caches hold, as far as the router knows.

Reading order: `chain` (names of a prompt's blocks), `index` (which engine holds which of them),
`events` (engines tell it), `prompts` (a request's tokens).
"""
