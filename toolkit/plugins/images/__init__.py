"""Data sets of images: torchvision's small ones, and folders of photographs, which may be kept decoded in memory."""
