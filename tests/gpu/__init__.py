"""Tests that need a GPU: ``make gpu``, on one machine, without a network.

``make test`` does not collect this folder, so none of it is among its skipped tests. The harness and the race of the
loops at a tiny size run on a CPU too: tests/dist/test_gpu_harness.py tests them there.
"""

NO_GPU = "torch.cuda.is_available() is false: this folder is for a machine with a GPU"
