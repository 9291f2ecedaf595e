"""When the roles of running instances are looked at again, and what they should
be then. Pure: the time is passed in, and the controller of instances and the
simulator drive the same objects.

A ``TrafficWatch`` is given requests; it reports when what comes has shifted beyond what
chance does within its window. Steps that were measured (``measured``) and the
window's requests are simulated with other roles (``roles``); whoever runs
instances asks for that in a process of its own (``__main__``).
"""
