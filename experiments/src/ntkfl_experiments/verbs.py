"""What this package adds to the command line: each verb's line in `ntkfl --help`, and the function behind it.

Imports nothing: the command line reads it at every start.
"""

VERBS = {
    "reproduce": ("The paper's figures, tables and theorems.", "ntkfl_experiments.cli.reproduce:reproduce"),
    "bench": ("Time this package beside the alternatives.", "ntkfl_experiments.cli.bench:bench"),
}
