"""What is said of accounting without its library; ε of sums is tested in test_sum_accounting.py."""

from __future__ import annotations

import sys

import pytest

from ntkfl.errors import ConfigError
from ntkfl.privacy.accounting import library


def test_without_the_extra_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting.rdp", None)
    with pytest.raises(ConfigError, match="pip install 'dp-accounting"):
        library("rdp")
