"""Wire: every message, its version, and the sockets that carry it."""
