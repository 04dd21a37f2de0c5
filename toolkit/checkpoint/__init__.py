"""Checkpoints: safetensors files and a JSON manifest, committed by one rename and verified at every read.

`folder` and `manifest` know files and never import torch, so the login node may use them. `writer.save` and
`reader.load` know tensors. This module imports nothing, for the same reason.
"""
