"""Kinds of posteriors: of each site's family, one Gaussian, sites off the likelihood, or expectation propagation.

A guide has one, ``guide.kind``, which its families decide, and its first call, where members meet. All else asks the
kind, and never which kind it is: :class:`.separate.Separate` lists the questions.
"""
