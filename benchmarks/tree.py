"""The prefix tree beside its peers; the same as `radixkv bench tree`, whose `--help` says what is measured."""

import sys

from engine.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "tree", *sys.argv[1:]]))
