"""Messages that reserve, keep and move KV."""
