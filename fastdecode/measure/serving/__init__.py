"""``fastdecode bench-serve``: what a server does under a load, seen from its clients."""
