"""The hand-over between two engines: tickets, holds, producers and consumers.

Reading order: `ticket`, `producer` and `holds` (the prefill side), `consumer` and `load` (the
decode side), `peers` (handshakes), `push`, `renew`. The docstrings of `producer` and `load` say
what happens when a process dies or stalls.
"""
