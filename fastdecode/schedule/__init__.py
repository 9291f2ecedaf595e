"""Which sequences step, which start, and on which R-worker: pure policy, with
no sockets, threads, clocks or torch."""
