"""``python -m kvwire`` is the ``kvwire`` command."""

import sys

from kvwire.cli.main import main

sys.exit(main())
