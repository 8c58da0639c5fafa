"""Serves the repositories in FOLDER until stdin ends, and prints its address first: `python tests/releasing/hub
FOLDER`.
"""

import argparse
import secrets
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # run by its path, the folder is not a package

from hub import Hub

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", type=Path)
parser.add_argument("--identity", required=True, help="who has it gets a token to write")
parser.add_argument("--repository", required=True, metavar="ORG/NAME", help="made if there is none: no client may")
parser.add_argument("--trusted", nargs="*", default=[], metavar="ORG", help="trusted publishers")
arguments = parser.parse_args()
with Hub(arguments.folder, secrets.token_hex(), trusted=arguments.trusted, identity=arguments.identity) as hub:
    hub.repository(arguments.repository)
    print(hub.url, flush=True)
    sys.stdin.read()  # until the parent process closes it or ends
