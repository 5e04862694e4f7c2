"""Random faults while prompts flow; every success has the right bytes or tokens.

`python scripts/chaos --faults 500 --engines 25 --router 200` (`make chaos`). First producer and
consumer processes with a real carrier (`peers`), then two real vLLM engines (`engines`), then a
real router before small engines (`router`). A round's choices depend on the seed and its number
alone: `--seed S --first N --faults 1` plays round N again (the machine's timing is its own).
"""
