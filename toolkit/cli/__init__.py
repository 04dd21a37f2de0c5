"""The ``toolkit`` command. Every command imports what it needs when it is called."""
