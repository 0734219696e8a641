"""``python -m kvwire_vllm.proxy`` runs the proxy."""

import sys

from kvwire.cli.console import prepare_output
from kvwire_vllm.proxy.command import main

if __name__ == "__main__":
    prepare_output()
    sys.exit(main())
