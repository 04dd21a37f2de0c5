"""What only a GPU can show: ``make gpu``, on one machine with one GPU or more, without a network.

``make test`` does not collect this folder, so none of it is among its skipped tests. What runs on a CPU too, the
harness and the race of the loops at a tiny size, is tested there by tests/dist/test_gpu_harness.py.
"""

NO_GPU = "torch.cuda.is_available() is false: this folder is for a machine with a GPU"
