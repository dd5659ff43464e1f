"""The key server and the shuffler as services. Every role has a folder of its own, and roles do not trust one another.

`federation.toml` in each folder is public and the same for all: addresses and public keys of the roles, and the run's
contract. Everything else in a role's folder is that role's alone.
"""
