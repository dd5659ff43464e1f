"""Attacks on what was really sent, and what they recover."""
