# SPDX-License-Identifier: Apache-2.0
"""What the engines' caches hold, as far as the router knows.

Reading order: `index` (names of blocks, and which engine holds which of them), `events` (engines
publish what they hold), `prompts` (a request's tokens).
"""
