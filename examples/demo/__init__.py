"""``python examples/demo``: prefill in one process, decode in another, KV between them.

* :mod:`~demo.command`: the command line.
* :mod:`~demo.run`: starts the processes and collects their events.
* :mod:`~demo.roles`: the work of each process.
* :mod:`~demo.lines`: the messages between the processes.
* :mod:`~demo.llama`: the interface of a model; ``numpy_llama`` and ``torch_llama``
  implement it, and compute the same.
* :mod:`~demo.record`: the events of a request; ``show`` prints them.
"""
