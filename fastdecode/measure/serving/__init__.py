"""``fastdecode bench-serve``: what a server does under a load, seen from its clients."""

KEY_VARIABLE = "OPENAI_API_KEY"
"""Where a client's key is read from."""
TIMEOUT_S = 600.0
