"""``fastdecode bench-serve``: a server under a load, measured by its clients."""

KEY_VARIABLE = "OPENAI_API_KEY"  # environment variable with a client's key
TIMEOUT_S = 600.0
