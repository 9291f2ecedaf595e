"""Which KV blocks outlive their sequences: pure policy, with time passed in."""
