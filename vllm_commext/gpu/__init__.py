"""Shared by all kernels: compiling, launching, memory that peers map."""
