"""Fuzzers that know the structure of what they break."""
