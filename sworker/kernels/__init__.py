"""Kernels put on a model from outside, for CUDA and for CPUs."""
