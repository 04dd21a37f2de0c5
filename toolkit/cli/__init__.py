"""The ``toolkit`` command: parse and dispatch. Every command imports what it needs when it is called."""
