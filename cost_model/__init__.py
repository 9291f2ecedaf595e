"""How many CPUs does this model need? Fits what workers measured, predicts
steps, sizes clusters.

Pure: no torch, no sockets, no clocks; the only input or output is reading the
data files it is given.

    hardware   what vendors state about GPUs, CPUs and NICs, with sources and efficiencies
    shapes     the built-in models
    workload   what one token of one layer costs in bytes and FLOPs
    fit        measured points -> functions with an error
    stages     the time of the S-part, the R-part and the network
    predict    one step of the pipeline: time per token, tokens/s, what limits it
    steady     a steady batch, for the comparison with a run
    plans/     the question, constraints, the plan, what-ifs, the GPU-only alternative; a plan as
               text, JSON, a plot or launch files
    simulate/  the scheduler over a trace of requests
"""
