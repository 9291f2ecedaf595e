"""Instances for prefill and instances for decode, placed for goodput: the greatest request rate
at which enough requests meet a TTFT and a TPOT (DistServe, OSDI 2024). ``answer`` is the way in.
"""
