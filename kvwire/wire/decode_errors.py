"""What msgspec raises of bytes that it cannot read."""

from __future__ import annotations

from typing import Final

import msgspec

# It reports a text that is no UTF-8 as Python does, and likewise what is deeper than
# its stack, even among fields that this version does not know.
DECODE_ERRORS: Final = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
