"""``fastdecode serve``: an HTTP process without torch, and its bridge to the engine."""
