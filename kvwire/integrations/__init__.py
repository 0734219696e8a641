"""kvwire inside other people's engines. Each needs its own library, and says which."""
