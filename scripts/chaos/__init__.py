"""Random faults while prompts flow; every success has the right bytes or tokens.

`python scripts/chaos --faults 500 --engines 25 --router 200` (`make chaos`). First producer and
consumer processes with a real carrier (`peers`), then two real vLLM engines (`engines`), then a
real router before small engines (`router`). A round's choices depend on the seed and its number
alone: `--seed S --first N --faults 1` plays round N again (the machine's timing is its own). What
was played is kept in out/chaos.json; a later run of the same seed goes on where an earlier one
stopped (after `--seconds`, or because something broke), as long as the code is the same.
"""
