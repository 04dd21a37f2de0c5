"""What a device is: the CPU, or a GPU of CUDA, ROCm or XPU. No other room knows what sets them apart."""
