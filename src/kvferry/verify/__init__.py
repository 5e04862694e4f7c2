"""Proof: random pairs of engines, planned by kvferry and compared with a brute-force oracle.

`case` says what a case is, in plain JSON values. `generate` makes them from a seed. `engine`,
`memory` and `oracle` work out by themselves, sharing no code with `layout` and `plan`, which byte
must be where. `sweep` plans each case, executes the copies on numbered bytes, and compares.
"""
