"""Messages over ZeroMQ sockets."""
