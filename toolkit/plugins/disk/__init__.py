"""What runs take on the disk: `toolkit rm`, `toolkit gc`."""
