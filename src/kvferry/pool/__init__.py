# SPDX-License-Identifier: Apache-2.0
"""The shared pool: a store keeps KV blocks by content, across engines, restarts and evictions.

Reading order: `scheduler` (what to look up, load and save), `lookup` and `hits` (what the pool
has), `rank` (moves bytes), `keys`, `objects` and `layout_registry` (names and layouts of objects),
`store` (the interface of stores).
"""
