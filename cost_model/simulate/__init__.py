"""What would a schedule gain? A trace, run by the real scheduler on simulated
workers against a virtual clock.

trace      requests and when they arrive
tables     step times from numbers that a user gives
simulator  the virtual clock and the simulated workers
report     the outcome as numbers, text or JSON
plot       load and step latency over steps, the modes side by side
"""
