"""The paper's figures, tables and statements, each worked out by one command."""
