"""``python -m toolkit`` is the ``toolkit`` command."""

import sys

from toolkit.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
