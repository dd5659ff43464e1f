"""The shuffler and the key server, beside Flower: what they hold, what they refuse, and how others reach them.

Flower carries questions and receipts. Sealed rows and masked sums go from a client straight to the shuffler, which
releases them to the aggregator without their senders. The key server enrols clients and gives them ρ. Neither service
loads torch. Each role has a folder of its own; `federation.toml` in it is public and the same for all (`peers.py`).
"""
