"""Checkpoints: safetensors files and a JSON manifest.

One rename commits a checkpoint, and every read verifies it.

`folder` and `manifest` know files and never import torch, so the login node may use them. `writer.save` and
`reader.load` know tensors. This module imports nothing, for the same reason.
"""
