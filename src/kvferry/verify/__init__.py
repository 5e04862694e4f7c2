# SPDX-License-Identifier: Apache-2.0
"""Proof: kvferry plans random pairs of engines, and a brute-force oracle checks the bytes.

`generate` makes cases from a seed. `oracle` says what a case is, and computes which byte must be
where; it shares no code with `layout` and `plan`. `sweep` plans each case, runs the copies on
numbered bytes, and compares the result with the oracle's.
"""
