"""Tests here attach runs, so each begins with torch unseeded."""

from unseeded import unseeded  # noqa: F401 - an autouse fixture
