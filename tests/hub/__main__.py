"""`python tests/hub FOLDER`: serves the repositories in FOLDER until it is ended; its address is the first line."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # run by its path, the folder is no package

from hub import Hub

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", type=Path)
parser.add_argument("--token", required=True, help="who has it may write")
parser.add_argument("--trusted", nargs="*", default=[], metavar="ORG", help="trusted publishers")
arguments = parser.parse_args()
with Hub(arguments.folder, arguments.token, trusted=arguments.trusted) as hub:
    print(hub.url, flush=True)
    sys.stdin.read()  # until who started this closes it, or ends
