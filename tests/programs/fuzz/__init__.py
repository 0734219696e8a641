"""Hostile bytes: targets that run without a fuzzer, and what drives them.

Each target is a function ``run(data) -> int`` that turns any bytes into something a
peer could send, feeds it to one part of the core, and returns how many bytes that part
was fed. It raises for a bug and for nothing else: what a peer sends leads to events or
to the exceptions that are documented, never to another one.

* ``python -m tests.programs.fuzz --seconds 60`` runs every target under atheris.
* ``tests/programs/fuzz/test_corpus.py`` runs them over the corpus and its mutations.
"""
