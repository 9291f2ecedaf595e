"""Every message that S-workers and R-workers exchange, and the transports that carry them."""
