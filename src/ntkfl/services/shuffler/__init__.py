"""The shuffler: its store, its HTTP application, its client."""
