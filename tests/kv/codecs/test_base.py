"""Forms: what has to be equal for an entry to be decoded."""

from __future__ import annotations

from tests.kv.codecs.images import form


def test_a_form_is_named_by_dtype_order_and_shape() -> None:
    forms = [form(), form("float16"), form(order=1), form(head_dim=64)]
    assert len({one.digest for one in forms}) == len(forms)
    assert form().digest == form().digest
    assert form().nbytes == form().elements * 2 == 2 * 2 * 8 * 2 * 32 * 2
    assert form().places("token", "dim") == (2, 4)
