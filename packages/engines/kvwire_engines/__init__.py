"""kvwire inside other projects' engines. Each module's docstring names its library."""
