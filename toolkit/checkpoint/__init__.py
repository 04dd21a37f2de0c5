"""Checkpoints: raw tensor bytes and a JSON manifest, committed by one rename, verified whenever they are read.

`store` and `manifest` know files and never import torch, so the login node may use them; `writer.save` and
`reader.load` know tensors. Nothing is imported here, for that reason.
"""
