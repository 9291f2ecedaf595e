"""The simulator: a trace, run by the real scheduler and lifecycle on a virtual clock."""
