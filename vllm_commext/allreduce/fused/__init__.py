"""All-reduce, residual and RMSNorm as one op: kernels, the op of torch, and the graph pass."""
