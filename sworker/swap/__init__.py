"""KV of more lanes than the device has room for: on the host, but for two."""
