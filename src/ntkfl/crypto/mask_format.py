"""Sizes of masks, apart from their arithmetic: a shuffler that only passes on rows does without numpy."""

from __future__ import annotations

SEED_BYTES = 32
WORD_BYTES = 4
MOST_NUMBERS = 1 << 29  # of one vector: its stream stays far below the 2^32 blocks of a nonce
