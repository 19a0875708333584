"""States of guides, one of each family, as a release saved them: run in a checkout of it, ``make.py FILE``.

``tests/test_old_states.py`` loads them into guides of today.
"""

import sys

import pyro
import torch

from pyro_sparsegp import AutoSparseGP, TraceQuadrature_ELBO

try:
    from tests.states.programs import FAMILIES, JOINT, at, data, model_of
except ImportError:  # run from a checkout without it
    from programs import FAMILIES, JOINT, at, data, model_of

if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    found = {}
    for name, family in (FAMILIES | JOINT).items():
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        model, x, y = model_of(name), *data()
        guide = AutoSparseGP(model, family())
        if "EP" in name:
            from pyro_sparsegp import ExpectationPropagation

            inference = ExpectationPropagation(model, guide, pyro.optim.Adam({"lr": 0.01}))
        else:
            inference = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO())
        for _ in range(3):
            inference.step(x, y)
        posterior = guide.posterior(at())["f"]
        state = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in guide.state_dict().items()
        }
        found[name] = state, posterior.mean.detach(), posterior.variance.detach()
        print(name, len(state))
    torch.save(found, sys.argv[1])
