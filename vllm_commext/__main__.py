"""``python -m vllm_commext``: the same as the command ``vllm-commext``."""

import sys

from vllm_commext.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
