"""`vllm-commext proxy` with values that no option sets: NAME=NUMBER ... -- OPTIONS."""

import argparse
import sys

from vllm_commext.cli import proxy


def main() -> int:
    end = sys.argv.index("--")
    parser = argparse.ArgumentParser()
    proxy.add_arguments(parser)
    args = parser.parse_args(sys.argv[end + 1 :])
    for name, _, value in (one.partition("=") for one in sys.argv[1:end]):
        setattr(args, name, float(value))
    return proxy.run(args)


if __name__ == "__main__":
    sys.exit(main())
