"""What would a schedule gain? A trace, run by ``fastdecode.schedule.simulation``.

trace      requests and when they arrive, from a file
tables     step times from numbers that a user gives
report     the outcome as numbers, text or JSON
plot       load and step latency over steps, the modes side by side
"""
