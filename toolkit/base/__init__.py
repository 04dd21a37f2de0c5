"""What every package stands on: errors, logs, signals, processes, files written whole."""
