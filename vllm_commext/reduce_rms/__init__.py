"""RMSNorm over rows that tensor parallelism has sharded, in one launch a rank.

Only each token's sums of squares travel, by a Lamport protocol in peer-mapped GPU memory.
`workspace` holds that memory, `ops` registers ``torch.ops.vllm_commext.qk_rms_norm``, and `kernel`
loads ``csrc/cuda/reduce_rms.cu``."""
