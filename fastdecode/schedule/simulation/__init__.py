"""One simulator: a virtual clock, and what happens on it.

clock        calls at times
steps        runs of decode steps that are one event
resources    how fast lanes go that share the S-worker, R-workers and links
trace        requests by their lengths and arrival
simulation   a trace, run by the real scheduler and lifecycle
"""
