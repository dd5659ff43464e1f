"""Clients on other machines: rounds whose messages Flower carries.

No algorithm is here. The ServerApp holds `Method.round`, the ClientApp gives `Method.answer`, and what crosses is a
`wire.Message` in a Flower record.
"""

import os

from ntkfl.extras import missing

# Read by Flower when it is imported: it tells nobody that it runs, and does not ask for newer versions of itself.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

try:
    import flwr  # noqa: F401
except ImportError as error:
    raise missing("Flower", "flower") from error
