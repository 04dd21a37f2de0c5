"""Jobs to copy: each is one short script with ``main(config)``, named in a config by its dotted path."""
