"""Roles as processes: the key server, the shuffler, the aggregator and the clients, which do not trust one another.

Every role has a folder of its own. `federation.toml` in it is public and the same for all: who is who (pinned keys and
addresses) and the terms of the run. Everything else in a role's folder is that role's alone.
"""
