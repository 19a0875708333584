"""Posteriors as ArviZ's trees."""
