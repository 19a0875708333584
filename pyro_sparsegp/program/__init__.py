"""What can be asked of a Pyro program, without a guide."""
