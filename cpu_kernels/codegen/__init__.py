"""From Python to vector instructions: what kernels are written in, and how it is compiled and kept."""
