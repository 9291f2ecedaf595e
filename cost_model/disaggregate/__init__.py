"""Pipelines of machines: does it pay to give prompts machines of their own, or
to keep only two microbatches' KV on the device? (DéjàVu, arXiv 2403.01876,
appendices D, G and H.)

split      machines for prompts and machines for tokens
memory     how many of either the model needs
swap       when swapping microbatches pays
profile    measured times of one machine
compare    pipelines of each kind over a trace
report     all of it as text or JSON
"""
