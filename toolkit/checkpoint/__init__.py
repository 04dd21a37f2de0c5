"""Checkpoints: safetensors files and a JSON manifest. One rename commits a checkpoint, and every read verifies it.

`folder` and `manifest` never import torch, nor does this module, so the login node may use them.
"""
