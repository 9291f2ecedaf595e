"""Instances for prefill and instances for decode, placed for goodput: the
greatest request rate at which enough requests meet a TTFT and a TPOT
(DistServe, OSDI 2024).

queueing    mean TTFT in closed form
slo         limits, and what part of the requests keeps them
traces      requests as they are published or logged
workload    fitted to a trace and drawn again, or given
instances   prefill and decode instances, for one phase or both, and their ports
simulator   requests through all of them
rates       the greatest rate within an SLO
placements  algorithms 1 and 2
hardware    instances that given GPUs and sockets make
search      the best of them
answer      a question, answered
report      as text, JSON, or a placement file
"""
