"""Pictures that ArviZ does not have."""
