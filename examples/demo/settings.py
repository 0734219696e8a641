"""What the demo's processes have to agree on."""

from pathlib import Path
from typing import Final

CHECKPOINT: Final = Path(__file__).parent / "model"
"""A checkpoint as ``save_pretrained`` writes it; see its README.md."""

BLOCK_TOKENS: Final = 16
"""Tokens of a block, the field's usual size."""
