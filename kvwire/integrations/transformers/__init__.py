"""Hugging Face transformers on a paged KV cache that kvwire can move.

Three classes, each useful alone:

* :class:`TensorPool`: torch tensors in blocks, shaped for a model's config, and the
  :class:`kvwire.PagedCache` over them.
* :class:`PagedSequence`: a ``transformers`` cache of one sequence in such blocks.
  Attention reads the blocks themselves, so it reads exactly the bytes that arrived.
* :class:`LayerMarks`: the hook that marks a layer of an outgoing transfer ready as soon
  as prefill has written it.

A prefill that streams::

    out = comm.publish(request, pool.cache, blocks, tokens=n)
    marks = LayerMarks(out, n, pool.spec.block_tokens)
    sequence = PagedSequence(pool, blocks, on_written=marks)
    model(input_ids, cache=sequence)     # in a thread; layers flow meanwhile
    out.finish()

and a decode that continues from it::

    outcome = await conn.pull(request, pool.cache, blocks, tokens=n)
    sequence = PagedSequence(pool, blocks, length=outcome.usable_tokens)
    model(rest_of_input_ids, cache=sequence)

Supported: decoder-only models whose layers all have full attention (Llama, Qwen,
Mistral without a window), transformers 5.24 or newer, one sequence per call, host
memory.
"""

from kvwire.integrations.transformers.sequence import (
    PagedSequence,
    TensorPool,
    kv_spec,
)
from kvwire.kv.marks import LayerMarks, Markable

__all__ = [
    "LayerMarks",
    "Markable",
    "PagedSequence",
    "TensorPool",
    "kv_spec",
]
