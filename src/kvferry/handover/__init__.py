"""Peer to peer: tickets, holds, producers and consumers, for any engine."""
