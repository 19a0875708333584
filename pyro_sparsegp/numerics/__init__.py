"""Linear algebra, integrals and passes over many rows: nothing here knows a kernel or a program."""
