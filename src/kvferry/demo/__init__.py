"""Two engines on one machine: real processes, real memory, every byte checked."""
