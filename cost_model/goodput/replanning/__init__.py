"""When the roles of running instances are judged again, and what they should be then.

Pure: the time is passed in, and the controller of instances and the simulator drive the same
objects. A ``TrafficWatch`` takes requests, and reports when the traffic has shifted beyond what
chance does within its window. Steps that were measured (``measured``) and the window's requests
are simulated with other roles (``roles``), in a process of their own (``asking``).
"""
