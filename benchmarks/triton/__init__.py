"""The Triton kernels without a GPU, and their launch parameters on one."""
