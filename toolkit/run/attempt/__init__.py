"""An attempt: what is known of it, the verdict about its end, what is written and advised then."""
