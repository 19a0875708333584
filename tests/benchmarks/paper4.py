"""Paper 4's experiments on this machine: expectation propagation against SVGP, the paper's figures beside ours.

python tests/benchmarks/paper4.py PART --data DIR [--repeats 3] [--seconds 60] [--device cpu]

PART is table1, mnist or flights; a section of paper4.md is printed, whose pictures and other sections 0656b30 made.
DIR holds the data, ``<set>.npz`` with X and y. Probit likelihood; squared exponential kernel with a length scale a
column (starting at the median distance of inputs), an amplitude (1) and additive noise (0.1); inducing inputs start
at random training rows, the same for all methods. SEP is ExpectationPropagation with damping 0.5 and a rate a
parameter (× 1.02, × 0.5: SignRates); "outer" the same at convergence only, which stands in for the paper's GFITC;
SVGP trains by L-BFGS, as the paper's SVI does, or where data come in mini-batches by the same Adadelta(0.9, 1e-5) as
SEP with damping 0.99, and by Adam(0.01). Times are of training alone.
"""

import itertools
import math
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
    def scores(self, guide):
        """Mean negative log likelihood and error of the test set."""
        q = guide.posterior(self.new)["f"]
        score = q.mean / (1 + q.variance).sqrt()
        nll = -Probit(score, validate_args=False).log_prob(self.labels).mean()
        return float(nll), float(((score > 0) != (self.labels > 0.5)).double().mean())


def split(args, name, seed=0, tests=0):
    """90 % for training and 10 % for testing, or ``tests`` rows; labels 0 and 1; rows with NaN are left out."""
    x, y = bench.read(args.data / f"{name}.npz")
    keep = ~x.isnan().any(-1)
    x, y = x[keep], y[keep]
    y = (y > 0 if name == "flights_houston2011" else y > y.min()).double()
    x, y = (x.float(), y.float()) if tests else (x, y)
    rows = bench.shuffled(len(x), seed)
    train, test = rows[tests or len(rows) // 10 :], rows[: tests or len(rows) // 10]
    return Data(bench.standardised(x, y, train)[0], y, train, test, args.device)


def expectation(data, z, batch=0, **options):
    """A step of expectation propagation, and its guide."""
    pyro.clear_param_store()  # a PyroModule's parameters are found there by name
    model = Classifier(data.x)
    guide = AutoSparseGP(model, SparseEP(z, trainable=True))
    if not batch:
        optim = pyro.optim.PyroOptim(SignRates, {"lr": 0.02})
        ep = ExpectationPropagation(model, guide, optim, **options)
        return lambda: ep.step(data.x, data.y), guide
    ep = ExpectationPropagation(model, guide, adadelta(), damping=0.99)
    return batched(ep, guide, data, batch, lambda rows: {"indices": rows}), guide


def variational(data, z, batch=0, optim=None):
    """A step of SVGP: ten iterations of L-BFGS, or one of an optimiser on a mini-batch."""
    pyro.clear_param_store()
    model = Classifier(data.x)
    guide = AutoSparseGP(model, SVGP(z))
    if batch:
        svi = pyro.infer.SVI(model, guide, optim, TraceQuadrature_ELBO(20))
        return batched(svi, guide, data, batch, lambda rows: {}), guide
    loss = TraceQuadrature_ELBO(20)(model, guide)
    loss(data.x, data.y)
    lbfgs = torch.optim.LBFGS(loss.parameters(), max_iter=10, history_size=20, line_search_fn="strong_wolfe")
    closure = bench.descending(lbfgs, lambda: loss(data.x, data.y))
    return lambda: float(lbfgs.step(closure).detach()), guide


def batched(trainer, guide, data, batch, more):
    """A step on the next of mini-batches of one size."""
    batches = (rows for rows in bench.epochs(len(data.x), batch) if len(rows) == batch)
    guide(data.x[:batch], data.y[:batch], size=len(data.x))

    def step():
        rows = next(batches).to(data.x.device)
        return trainer.step(data.x[rows], data.y[rows], size=len(data.x), **more(rows))

    return step


def adadelta():
    return pyro.optim.Adadelta({"lr": 1.0, "rho": 0.9, "eps": 1e-5})


def curve(made, data, seconds, first=0.05):
    """(seconds, NLL, error, objective) at times that grow by a quarter; evaluation takes no time."""
    step, guide = made
    spent, due, found = 0.0, first, []
    while spent < seconds:
        start = time.perf_counter()
        value = step()
        spent += time.perf_counter() - start
        if spent >= due or spent >= seconds:
            found.append([spent, *data.scores(guide), value])
            due = max(1.25 * due, spent)
    return found


def trained(made, iterations):
    """The guide after so many steps."""
    step, guide = made
    for _ in range(iterations):
        step()
    return guide


# Parts: what each found, by name.


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
            add(found, f"{name} {share} {method}", [data.scores(guide)[0], seconds])
    return found


def stochastic(args, data, more):
    """Error and NLL against time of mini-batches of 200 with m = 200, and more."""
    z, found = data.inducing(200, 0), {}
    ways = {
        "SEP": lambda: expectation(data, z, batch=200),
        "SVGP, Adadelta": lambda: variational(data, z, 200, adadelta()),
        "SVGP, Adam": lambda: variational(data, z, 200, pyro.optim.Adam({"lr": 0.01})),
    }
    for key, make in (ways | more(data, z)).items():
        pyro.set_rng_seed(0)
        add(found, key, curve(make(), data, args.seconds, 1.0))
    return found


def mnist(args):
    """Odd against even digits."""
    z = np.load(args.data / "mnist.npz")
    x = torch.from_numpy(np.concatenate([z["Xtrain"], z["Xtest"]])).flatten(1).float() / 255
    y = torch.from_numpy(np.concatenate([z["ytrain"], z["ytest"]]) % 2).float()
    data = Data(x, y, slice(60000), slice(60000, None), args.device)
    return stochastic(
        args,
        data,
        lambda data, z: {"SEP, batch": lambda: expectation(data, z), "SVGP, batch": lambda: variational(data, z)},
    )


def flights(args):
    """Whether a flight was late; a logistic regression beside."""
    from sklearn.linear_model import LogisticRegression

    data = split(args, "flights_houston2011", tests=10_000)
    found = stochastic(args, data, lambda data, z: {})
    start = time.perf_counter()
    linear = LogisticRegression(max_iter=1000).fit(data.x.cpu(), data.y.cpu())
    seconds = time.perf_counter() - start
    p, labels = torch.from_numpy(linear.predict_proba(data.new.cpu())[:, 1]), data.labels.cpu()
    nll = -(labels * p.log() + (1 - labels) * (1 - p).log()).mean()
    error = ((p > 0.5) != (labels > 0.5)).double().mean()
    add(found, "logistic regression", [[seconds, float(nll), float(error), math.nan]])
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


def of_curves(found):
    rows = []
    for key, (line,) in found.items():
        seconds, nll, error = line[-1][:3]
        rows.append([key, f"{seconds:.0f}", f"{error:.2%}", f"{nll:.4f}", f"{before(line, 4)[1]:.4f}"])
    return (bench.table(["method", "seconds", "error", "NLL", "NLL after a quarter of the time"], rows),)


def before(line, share):
    """The last point of the first share of the time."""
    return ([point for point in line if point[0] <= line[-1][0] / share] or line[:1])[-1]


PARTS = {  # what runs, the section's title and what it says of the figures
    "table1": (table1, "Table 1: test NLL after 250 iterations", of_table1),
    "mnist": (
        mnist,
        "MNIST, odd against even (the paper, by all data: SEP 2.7 % and 0.0694, SVI 2.2 % and 0.0655)",
        of_curves,
    ),
    "flights": (flights, "Flights, Houston 2011, late or not", of_curves),
}


def main():
    args = bench.parsed(__doc__, *PARTS, data=Path(), repeats=3, seconds=60.0, sets=list(SETS), device="cpu")
    run, title, text = PARTS[args.part]
    bench.Page().say("", f"## {title}, {bench.machine(args.device)}", "", "\n\n".join(text(run(args))))


if __name__ == "__main__":
    main()
