"""Finds in a log what ended a job, by rules. `diagnosis` applies them, and ``rules/*.toml`` holds them."""
