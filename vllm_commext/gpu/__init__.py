"""What the kernels of this package share: compiling, launching, memory that peers map."""
