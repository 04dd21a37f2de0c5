"""`toolkit logs`: a run's logs, those of its ranks merged by time. `--follow`: how a run gets on."""
