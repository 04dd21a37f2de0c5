"""`data.share: auto`: slower ranks get fewer samples of each global batch."""
