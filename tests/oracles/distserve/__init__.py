"""The simulator that DistServe's authors published (simdistserve), as it is: its latency profile
of an A100 and its queues. To compare with, never to plan by: it knows no transfer of K and V, lets
decoding take any memory, and counts a decode iteration too many.

a100.json  its profile, with its licence beside it profile    latencies and the tokens that fit
simulator  prefill and decode instances, or one for both"""
