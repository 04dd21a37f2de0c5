"""Who watches the nodes of a job: use and health, hangs, dead nodes."""
