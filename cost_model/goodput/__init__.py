"""Instances for prefill and instances for decode, placed for goodput: the
greatest request rate at which enough requests meet a TTFT and a TPOT
(DistServe, OSDI 2024).

queueing   mean TTFT in closed form
slo        limits, and what part of the requests keeps them
published  the authors' simulator as it is
"""
