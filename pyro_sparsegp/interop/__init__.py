"""Other libraries' interfaces, each with an extra of its own: ``pyro_sparsegp.interop.botorch``."""
