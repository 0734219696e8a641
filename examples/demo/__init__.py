"""``python examples/demo``: prefill in one process, decode in another, KV between them.

* :mod:`~demo.command`: the command line.
* :mod:`~demo.run`: starts the processes and gathers what they say.
* :mod:`~demo.roles`: what the processes do.
* :mod:`~demo.lines`: what the processes tell each other.
* :mod:`~demo.llama`: what a role needs of a model, ``numpy_llama`` and ``torch_llama``
  are two that compute the same.
* :mod:`~demo.record`: what happened; ``show`` shows it.
"""
