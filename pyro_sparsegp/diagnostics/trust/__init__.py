"""Whether to trust a posterior."""
