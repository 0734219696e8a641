"""Programs that people start, each a folder; what is beside this folder are tests.

``python -m tests.programs.NAME --help`` describes each of them:

========== =====================================================================
bench      measures kvwire beside others' software
sim        plays faults against the protocol core, in virtual time
soak       moves bytes between processes that are cut off, stopped and killed
fuzz       feeds hostile bytes to what reads a peer's bytes, under atheris
model      compares a store on a disk with a model of it, through kills
torture    kills what a store is made of
faults     breaks real engines of vLLM, with kvwire and with NixlConnector
reference  writes the pages of docs/reference that come from the code
structure  counts rooms, arrows, rings and idioms of kvwire, and holds their ceilings
========== =====================================================================

The ``test_*.py`` of a folder run a small round of its program, so that it stays alive.
"""
