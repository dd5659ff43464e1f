"""The key server: its store, its HTTP application, its client."""
