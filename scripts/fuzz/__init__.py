"""Hostile input, made with the shape of what is expected: `python scripts/fuzz` (`make fuzz`).

Each module here has `run(frames, seed)`: it sends that many frames, requests or damaged files to
the real thing, with the secret and without, and raises where something crashes, hangs, grows, is
read outside of what is registered, or is answered with other bytes than were stored. A good peer
is served in between. The same seed sends the same frames.
"""
