"""R-workers that share out the KV heads, seen as one."""
