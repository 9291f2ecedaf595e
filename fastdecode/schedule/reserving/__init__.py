"""Who starts, and where there is room: KV blocks are reserved before they are needed."""
