"""What kernels are written in: vectors in LLVM IR, compiled once and kept on disk."""
