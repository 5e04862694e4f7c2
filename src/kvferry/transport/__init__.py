"""Carry: the ways in which bytes move from one rank to another."""
