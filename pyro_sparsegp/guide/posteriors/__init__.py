"""How q answers: by each site's family, by one Gaussian, by sites off the likelihood, or by expectation propagation.

A guide has one kind, ``guide.q``, which its families decide, and its first call, where members meet. All else asks the
kind, and never which kind it is: :class:`.separate.Separate` lists the questions.
"""
