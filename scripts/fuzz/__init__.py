"""Frames that no kvferry would send, against servers that must go on: one module for each door."""
