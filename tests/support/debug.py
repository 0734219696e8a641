"""For tests of assertions, which ``python -O`` leaves out."""

import pytest

needs_asserts = pytest.mark.skipif(not __debug__, reason="asserts are off under -O")
