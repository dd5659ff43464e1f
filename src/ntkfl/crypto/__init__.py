"""Keys, sealing, credentials and framing: what the parties of a federation sign and encrypt."""
