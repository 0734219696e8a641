"""``kvwire demo``: prefill in one process, decode in another, KV between them.

* :mod:`~kvwire.cli.demo.command`: the command line.
* :mod:`~kvwire.cli.demo.run`: starts the processes and gathers what they say.
* :mod:`~kvwire.cli.demo.roles`: what the processes do; ``role`` is what is started.
* :mod:`~kvwire.cli.demo.lines`: what the processes tell each other.
* :mod:`~kvwire.cli.demo.llama`: what a role needs of a model, ``numpy_llama`` and
  ``torch_llama`` are two that compute the same.
* :mod:`~kvwire.cli.demo.record`: what happened; ``show`` shows it.
"""
