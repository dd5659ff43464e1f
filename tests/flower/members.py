"""`python members.py COMMANDS`: `ntkfl flower client` command lines (JSON) as processes of their own, forked after one
import. Prints their ids by folder.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from ntkfl.cli import main

if __name__ == "__main__":
    torch.set_num_threads(1)
    children = {}
    for command in json.loads(sys.argv[1]):
        child = os.fork()
        if child == 0:
            sys.argv = ["ntkfl", *command]
            main()
            os._exit(0)
        children[command[2]] = child
    print(json.dumps(children), flush=True)
    for child in children.values():
        os.waitpid(child, 0)
