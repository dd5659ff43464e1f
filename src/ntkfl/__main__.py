"""`python -m ntkfl` is the `ntkfl` command."""

from ntkfl.cli import main

main()
