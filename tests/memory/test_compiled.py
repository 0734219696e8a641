"""The compiled library: only one that belongs to its source is used."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvwire.memory.compiled import LIBRARY, compiled_function


def test_a_library_of_another_source_is_not_used(tmp_path: Path) -> None:
    """Its functions may take other arguments: without the check, it crashes."""
    source = LIBRARY.with_suffix(".c")
    if not (LIBRARY.exists() and source.exists()):
        pytest.skip("needs a tree of sources, installed with a C compiler")
    library = tmp_path / LIBRARY.name
    shutil.copy(LIBRARY, library)
    copied = tmp_path / source.name
    shutil.copy(source, copied)
    assert compiled_function("kvwire_copy", library=library) is not None
    other = tmp_path / "other.so"
    shutil.copy(LIBRARY, other)
    other.with_suffix(".c").write_text(source.read_text() + "\n")
    with pytest.warns(RuntimeWarning, match=r"compiled from another other\.c"):
        assert compiled_function("kvwire_copy", library=other) is None
    alone = tmp_path / "alone.so"
    shutil.copy(LIBRARY, alone)
    assert compiled_function("kvwire_copy", library=alone) is not None
