"""Sparse posteriors: the one formula for marginals, components, paths, and how they are drawn."""
