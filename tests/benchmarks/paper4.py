"""Paper 4's table 1 on this machine: expectation propagation against SVGP, the paper's figures beside ours.

python tests/benchmarks/paper4.py --data DIR [--repeats 3] [--device cpu]

The first section of paper4.md is printed, whose others 0656b30 made. DIR holds ``<set>.npz`` with X and y. Probit
likelihood; squared exponential kernel with a length scale a column (starting at the median distance of inputs), an
amplitude (1) and additive noise (0.1); inducing inputs start at random training rows, the same for all methods. SEP
is ExpectationPropagation with damping 0.5 and a rate a parameter (× 1.02, × 0.5: SignRates); "outer" the same at
convergence only, which stands in for the paper's GFITC; SVGP trains by L-BFGS, as the paper's SVI does. Times are of
training alone.
"""

import itertools
import time
from pathlib import Path

import bench
import numpy as np
import pyro
import torch
from pyro.nn import PyroModule, PyroParam
from torch.distributions import constraints

from pyro_sparsegp import AutoSparseGP, ExpectationPropagation, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.distributions import Probit
from pyro_sparsegp.families import SVGP, SparseEP

SETS = ("australian", "breast_w", "heart", "ionosphere", "pima_ripley532", "sonar")
SHARES = (0.15, 0.25, 0.5)
# Paper 4, table 1: GFITC, SEP and SVI for each share.
PAPER = {
    "australian": (0.68, 0.69, 0.63, 0.68, 0.67, 0.63, 0.67, 0.64, 0.63),
    "breast_w": (0.10, 0.11, 0.10, 0.11, 0.11, 0.10, 0.11, 0.11, 0.10),
    "heart": (0.43, 0.40, 0.39, 0.42, 0.41, 0.40, 0.42, 0.41, 0.40),
    "ionosphere": (0.30, 0.26, 0.26, 0.29, 0.27, 0.27, 0.30, 0.27, 0.26),
    "pima_ripley532": (0.54, 0.52, 0.49, 0.53, 0.51, 0.50, 0.53, 0.50, 0.49),
    "sonar": (0.35, 0.33, 0.40, 0.35, 0.32, 0.40, 0.35, 0.29, 0.35),
    "seconds": (59, 17, 40, 133, 37, 65, 494, 130, 195),
}


OUTER = {"schedule": "outer", "tolerance": 1e-2, "max_sweeps": 25}


class Classifier(PyroModule):
    """Probit classification; its hyperparameters are its own."""

    def __init__(self, x):
        super().__init__()
        median = torch.pdist(x[bench.shuffled(len(x))[:500].to(x.device)]).median()
        self.length = PyroParam(median.repeat(x.shape[-1]), constraints.positive)
        self.scale = PyroParam(x.new_ones(()), constraints.positive)
        self.noise = PyroParam(x.new_full((), 0.1), constraints.positive)

    def forward(self, x, y=None, size=None):
        kernel = self.scale * kernels.RBF(self.length) + kernels.White(self.noise)
        f = pyro.sample("f", GaussianProcess(kernel, x))
        with pyro.plate("data", size or len(x), subsample=x):
            return pyro.sample("y", Probit(f), obs=y)


class SignRates(torch.optim.Optimizer):
    """Gradient steps with a rate for each number: × 1.02 while its gradient keeps its sign, × 0.5 when that turns.

    The first step is of size ``lr``, which the paper does not state; none is above 0.2.
    """

    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["rate"] = group["lr"] / p.grad.abs().clamp(min=1e-3 * float(p.grad.abs().max()) + 1e-12)
                    state["sign"] = p.grad.sign()
                sign = p.grad.sign()
                state["rate"] *= torch.where(sign == state["sign"], 1.02, 0.5)
                state["sign"] = sign
                p -= (state["rate"] * p.grad).clamp(-0.2, 0.2)


class Data:
    """Rows for training, and new ones with their labels."""

    def __init__(self, x, y, train, test, device):
        self.x, self.y, self.new, self.labels = (t.to(device) for t in (x[train], y[train], x[test], y[test]))

    def inducing(self, num, seed):
        """Random training rows."""
        rows = bench.shuffled(len(self.x), 1000 + seed)[:num]
        return self.x[rows.to(self.x.device)] + 1e-3 * torch.randn(num, self.x.shape[-1]).to(self.x)

    @torch.no_grad()
    def score(self, guide):
        """Mean negative log likelihood of the test set."""
        q = guide.posterior(self.new)["f"]
        return -float(Probit(q.mean / (1 + q.variance).sqrt(), validate_args=False).log_prob(self.labels).mean())


def split(args, name, seed):
    """90 % for training and 10 % for testing; labels 0 and 1; rows with NaN are left out."""
    x, y = bench.read(args.data / f"{name}.npz")
    keep = ~x.isnan().any(-1)
    x, y = x[keep], y[keep]
    rows = bench.shuffled(len(x), seed)
    train, test = rows[len(rows) // 10 :], rows[: len(rows) // 10]
    return Data(bench.standardised(x, y, train)[0], (y > y.min()).double(), train, test, args.device)


def expectation(data, z, **options):
    """A step of expectation propagation, and its guide."""
    pyro.clear_param_store()  # a PyroModule's parameters are found there by name
    model = Classifier(data.x)
    guide = AutoSparseGP(model, SparseEP(z, trainable=True))
    ep = ExpectationPropagation(model, guide, pyro.optim.PyroOptim(SignRates, {"lr": 0.02}), **options)
    return lambda: ep.step(data.x, data.y), guide


def variational(data, z):
    """A step of SVGP: ten iterations of L-BFGS."""
    pyro.clear_param_store()
    model = Classifier(data.x)
    guide = AutoSparseGP(model, SVGP(z))
    loss = TraceQuadrature_ELBO(20)(model, guide)
    loss(data.x, data.y)
    lbfgs = torch.optim.LBFGS(loss.parameters(), max_iter=10, history_size=20, line_search_fn="strong_wolfe")
    closure = bench.descending(lbfgs, lambda: loss(data.x, data.y))
    return lambda: float(lbfgs.step(closure).detach()), guide


def trained(made, iterations):
    """The guide after so many steps."""
    step, guide = made
    for _ in range(iterations):
        step()
    return guide


def table1(args):
    """NLL and seconds of 250 iterations."""
    found, sets = {}, args.sets
    for seed, name, share in itertools.product(range(args.repeats), sets, SHARES):
        data = split(args, name, seed)
        z = data.inducing(round(share * (len(data.x) + len(data.new))), seed)
        for method in ("outer", "SEP", "SVGP"):
            pyro.set_rng_seed(seed)
            start = time.perf_counter()
            if method == "SVGP":
                guide = trained(variational(data, z), 25)
            else:
                guide = trained(expectation(data, z, **(OUTER if method == "outer" else {})), 250)
            seconds = time.perf_counter() - start
            add(found, f"{name} {share} {method}", [data.score(guide), seconds])
    return found


def add(found, key, value):
    """One more repeat."""
    found.setdefault(key, []).append(value)
    print(key, value[-1], flush=True)


# The page.


def of_table1(found):
    seconds, rows = {}, []
    for name in [name for name in SETS if f"{name} {SHARES[0]} SEP" in found]:
        cells = []
        for (share, method), paper in zip(itertools.product(SHARES, ("outer", "SEP", "SVGP")), PAPER[name]):
            runs = np.array(found[f"{name} {share} {method}"])
            seconds.setdefault((share, method), []).append(runs[:, 1].mean())
            cells.append(f"{runs[:, 0].mean():.2f} ({runs[:, 0].std():.2f}) [{paper:.2f}]")
        rows.append([name, *cells])
    times = (f"{np.mean(spent):.1f} [{paper}]" for spent, paper in zip(seconds.values(), PAPER["seconds"]))
    heads = ["set", *(f"{method} {share:.0%}" for share, method in seconds)]
    repeats = max(map(len, found.values()))
    note = f"Mean of {repeats} splits (standard deviation); in brackets the paper's, of 20. Pima is Ripley's."
    return note, bench.table(heads, [*rows, ["seconds", *times]])


def main():
    args = bench.parsed(__doc__, data=Path(), repeats=3, sets=list(SETS), device="cpu")
    title = "Table 1: test NLL after 250 iterations"
    bench.Page().say("", f"## {title}, {bench.machine(args.device)}", "", "\n\n".join(of_table1(table1(args))))


if __name__ == "__main__":
    main()
