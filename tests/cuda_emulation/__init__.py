"""The CUDA kernels of csrc/cuda, run on the host by an emulator of blocks and barriers."""
