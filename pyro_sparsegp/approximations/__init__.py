"""A GP site's prior to its posterior: one module for each kind of approximation."""
