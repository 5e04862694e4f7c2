"""A hand-over between two engines of different shape on one machine, with every byte checked."""
