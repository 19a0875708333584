"""What share of the package's lines in function bodies its core uses run: python tests/core_use.py

Core uses are what the five papers' families are for: each is trained, asked, drawn from, saved and loaded, and one is
fitted and exported. Lines are those that the interpreter knows of, without the ``def`` itself.
"""

import sys
import tempfile
import types
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PACKAGE = str(ROOT / "pyro_sparsegp") + "/"
RAN: dict[types.CodeType, set[int]] = {}


def called(frame, event, arg):
    """Follow what is called of the package, line by line."""
    if not frame.f_code.co_filename.startswith(PACKAGE):
        return None
    lines = RAN.setdefault(frame.f_code, set())

    def followed(frame, event, arg):
        lines.add(frame.f_lineno)
        return followed

    return followed


def bodies(code):
    """The lines of functions in a file's code, by function."""
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            if part.co_flags & 2 or part.co_name.startswith("<"):  # CO_NEWLOCALS: a function, no class body
                found = {number for *_, number in part.co_lines() if number and number > part.co_firstlineno}
                yield part, found
            yield from bodies(part)


def use():
    import pyro
    import pyro.distributions as dist
    import torch

    from pyro_sparsegp import (
        AutoSparseGP,
        ExpectationPropagation,
        GaussianProcess,
        TraceQuadrature_ELBO,
        families,
        fit,
        kernels,
        predict,
    )
    from pyro_sparsegp.diagnostics import to_datatree

    x = torch.rand(60, 2)
    y = torch.sin(6 * x[:, 0]) + x[:, 1] + 0.2 * torch.randn(60)

    def program(kernel, classes=False):
        def model(x, y=None, size=None):
            if kernel is deep:
                pyro.module("network", network)
            scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
            noise = pyro.sample("noise", dist.HalfNormal(1.0))
            f = pyro.sample("f", GaussianProcess(scale * kernel, x))
            with pyro.plate("data", size or len(x), subsample=x):
                likelihood = dist.Bernoulli(logits=f) if classes else dist.Normal(f, noise)
                return pyro.sample("y", likelihood, obs=y)

        return model

    smooth, terms = kernels.Matern32(torch.ones(2)), kernels.RBF(0.5)[0] + kernels.Matern52(0.5)[1]
    finite = kernels.RandomFourier(torch.randn(20, 2))
    network = torch.nn.Sequential(torch.nn.Linear(2, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))
    deep, image = kernels.DeepBasis(network), kernels.Convolutional(kernels.RBF(0.5), (1, 2), (1, 1))
    free = [families.SVGP(8), families.OrthogonalInducing(5, 5), families.OrthogonallyDecoupled(5, 5)]
    sites = [families.SGPR(8), families.CollapsedOrthogonal(5, 5), families.SemiCollapsedOrthogonal(5, 5)]
    sites += [families.ComputationAware(8), families.ComputationAware(8, "cg"), families.ConditionalSGPR(8)]
    sites += [families.ComputationAware(8, batches=True)]
    additive = [families.CoupledPrecision(6), families.MeanFieldAdditive(6), families.CoupledCovariance(6)]
    additive += [families.AdditiveSGPR(6)]
    uses = [(program(smooth, classes), family) for family in free + sites for classes in (False, True)]
    uses += [(program(terms), family) for family in additive]
    weights = (families.WeightSpace(), families.ExactWeightSpace())
    uses += [(program(kernel), family) for kernel in (finite, deep) for family in weights]
    uses += [(program(image, True), families.SVGP(5))]
    uses += [(program(smooth, True), families.SparseEP(8))]
    for model, family in uses:
        pyro.clear_param_store()
        labels = (y > y.mean()).to(y) if "SparseEP" in repr(family) or model.__closure__[0].cell_contents else y
        guide, optim = AutoSparseGP(model, family), pyro.optim.Adam({"lr": 0.01})
        if isinstance(family, families.SparseEP):
            trainer = ExpectationPropagation(model, guide, optim)
        else:
            trainer = pyro.infer.SVI(model, guide, optim, TraceQuadrature_ELBO())
        for _ in range(3):
            trainer.step(x, labels)
        predict(model, guide, x[:7], num_samples=3)
        guide.posterior(x[:7])["f"].paths(2)(x[:5])
        other = AutoSparseGP(model, family)
        other.load_state_dict(guide.state_dict())
        other.posterior(x[:7])["f"].components  # noqa: B018
    pyro.clear_param_store()
    model = program(smooth)
    guide = AutoSparseGP(model, families.SVGP(8))
    with tempfile.TemporaryDirectory() as place:
        fit(model, guide, (x, y), batch_size=20, steps=6, progress=False, checkpoint=Path(place) / "fit")
    fit(model, AutoSparseGP(model, families.SVGP(8)), (x, y), steps=100, progress=False)
    to_datatree(model, guide, x, y, num_samples=20)


def main():
    warnings.simplefilter("ignore")
    import pyro_sparsegp.diagnostics  # noqa: F401  # not in what is counted

    sys.settrace(called)
    use()
    sys.settrace(None)
    ran, lines = Counter(), Counter()
    hit = {(code.co_filename, code.co_firstlineno, code.co_name): numbers for code, numbers in RAN.items()}
    for path in sorted(Path(PACKAGE).rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0]
        for code, numbers in bodies(compile(path.read_text(), str(path), "exec")):
            lines[room] += len(numbers)
            ran[room] += len(numbers & hit.get((str(path), code.co_firstlineno, code.co_name), set()))
    for room in lines:
        print(f"{room:<20} {ran[room]:>5} of {lines[room]:>5}  {ran[room] / max(lines[room], 1):.0%}")
    share = ran.total() / lines.total()
    print(f"core uses run {share:.1%} of {lines.total()} lines in function bodies")


if __name__ == "__main__":
    main()
