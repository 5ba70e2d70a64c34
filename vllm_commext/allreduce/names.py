"""The names of the backends, in the table, in the settings and in the log."""

FLASHINFER_ONE_SHOT = "flashinfer_one_shot"
CUSTOM = "custom"
NCCL = "nccl"
PUSH = "push"  # our own kernel
VLLM = "vllm"  # no backend of ours: vLLM's default dispatch, untouched

BACKENDS = (FLASHINFER_ONE_SHOT, CUSTOM, PUSH, NCCL)

# Who serves all-reduce, residual and norm together.
FUSED_PUSH = "fused_push"  # our own kernels, in one launch
FUSED_FLASHINFER = "fused_flashinfer"  # FlashInfer's kernel, which vLLM's own pass puts there
UNFUSED = "apart"  # the all-reduce, and then a kernel for the rest
FUSED = (FUSED_PUSH, FUSED_FLASHINFER, UNFUSED)
