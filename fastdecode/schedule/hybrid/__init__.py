"""KV on both sides: which sequences live in the device's memory, which on R-workers."""
