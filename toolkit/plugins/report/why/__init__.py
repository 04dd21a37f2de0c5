"""Why a job ended."""
