"""Paper 3's table 1 on this machine: deep basis kernels against GPs, sparse GPs and deep kernels.

python tests/benchmarks/paper3.py --data DIR [--sets pol protein] [--seconds 60] [--seeds 2] [--keep RUNS]

DIR holds ``<set>.npz`` with X and y. As in the paper: inputs to [-1, 1] and targets to mean 0 and variance 1 before
splitting 70/10/20 at random; a tanh ResNet of two layers of 128; r = 128 basis functions or inducing points; deep
kernels with two features, an RBF, learned inducing points; lengths start at the root of their number; noise variance
from 1e-2, above 1e-6; Adam, weight decay 1e-4 on the network; batches of 256; the state of the best validation NLL is
tested. Other than there, each method has ``--seconds`` of training on this machine (of the process on a CPU, by the
clock on a GPU) and ``--iterations`` at most, the optimiser sees the bound per datum, and GP and DKL, exact by
Cholesky, see ``--exact-rows`` of the training rows. Under ``--keep`` are the runs, with their curves: iterations,
seconds, MAE, RMSE and NLL of test rows, loss of a datum, by how much features' mean squared norm is below the largest,
noise sd. The same command goes on where they were cut.

DBK and SVDBK are the paper's: the network's outputs as they are. DBK-n and SVDBK-n are not in the paper: the rows of
outputs are scaled to one learned norm, so that the correction is 0 throughout.
"""

import copy
import itertools
import math
import statistics
from pathlib import Path

import bench
import pyro
import pyro.distributions as dist
import torch
from torch import nn

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SGPR, SVGP, ExactWeightSpace, WeightSpace

RANK, WIDTH, FLOOR = 128, 128, 1e-6

# MAE, RMSE, NLL, seconds on a V100; means of 5 seeds.
PAPER = {
    "pol": {
        "GP": (0.0720, 0.1188, -0.4172, 1373.1),
        "sGP": (0.1853, 0.2594, 0.1520, 88.8),
        "DKL": (0.0764, 0.1956, -0.6502, 427.7),
        "sDKL": (0.0262, 0.0654, -1.2917, 40.7),
        "DBK": (0.0249, 0.0583, -1.5117, 48.0),
        "DBK-c": (0.0501, 0.0900, -0.9720, 21.0),
        "DBK-r": (0.0325, 0.0615, -1.4297, 80.3),
        "DBK-cr": (0.0303, 0.0599, -1.3825, 37.0),
        "SVGP": (0.0982, 0.1599, -0.3441, 527.0),
        "SVDKL": (0.0603, 0.1282, -0.5750, 89.9),
        "SVDBK": (0.0806, 0.1263, -0.5228, 112.4),
        "SVDBK-c": (0.0808, 0.1271, -0.5378, 86.7),
        "SVDBK-r": (0.0485, 0.0935, -0.5978, 292.9),
        "SVDBK-cr": (0.0558, 0.0943, -0.7012, 215.8),
    },
    "protein": {
        "sGP": (0.5870, 0.7311, 1.1092, 118.7),
        "sDKL": (0.4055, 0.6036, 2.3040, 93.7),
        "DBK": (0.4592, 0.6525, 2.2843, 85.7),
        "DBK-c": (0.4925, 0.7279, 4.3396, 75.6),
        "DBK-r": (0.4115, 0.5769, 0.9324, 107.0),
        "DBK-cr": (0.4239, 0.6077, 1.5096, 79.0),
        "SVGP": (0.6114, 0.7554, 1.1394, 1546.0),
        "SVDKL": (0.3924, 0.5656, 0.8634, 281.9),
        "SVDBK": (0.3730, 0.5519, 0.8425, 266.5),
        "SVDBK-c": (0.3922, 0.5631, 0.8724, 217.2),
        "SVDBK-r": (0.3785, 0.5590, 0.8460, 297.6),
        "SVDBK-cr": (0.4057, 0.5705, 0.8736, 191.0),
    },
}


METHODS = [*PAPER["pol"]]
METHODS.insert(METHODS.index("DBK") + 1, "DBK-n")
METHODS.insert(METHODS.index("SVDBK") + 1, "SVDBK-n")


class ResNet(nn.Module):
    """A linear layer, two residual tanh layers, a linear layer."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.first, self.last = nn.Linear(inputs, WIDTH), nn.Linear(WIDTH, outputs)
        self.middle = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x):
        """(N, D) to (N, r)."""
        h = self.first(x)
        for layer in self.middle:
            h = h + torch.tanh(layer(h))
        return self.last(h)


class EvenRows(nn.Module):
    """A network's outputs, each row scaled to one learned norm."""

    def __init__(self, network):
        super().__init__()
        self.network, self.log_norm = network, nn.Parameter(torch.zeros(()))

    def forward(self, x):
        """(N, D) to (N, r)."""
        return self.log_norm.exp() * nn.functional.normalize(self.network(x), dim=-1)


class Method:
    """A model with its guide: what is trained, and its predictions.

    :param name: as in table 1; "SV" is trained by batches, "-c" has no correction, "-r" one basis function, "-n" rows
        of one learned norm.
    :param network: makes a network of given inputs and outputs.
    """

    def __init__(self, name, network, x, seed=0):
        torch.manual_seed(seed)
        pyro.set_rng_seed(seed)
        pyro.clear_param_store()
        self.name, self.batched = name, name.startswith("SV")
        flags = name.partition("-")[2]
        self.basis, self.deep = "DBK" in name, "DK" in name or "DBK" in name
        self.correction = "c" not in flags
        self.network = None
        width = x.shape[-1]
        if self.basis:
            self.network = network(width, 1 if "r" in flags else RANK)
            self.network = EvenRows(self.network) if "n" in flags else self.network
        elif self.deep:
            self.network, width = network(width, 2), 2
        if self.network is not None:
            self.network.to(x)
        self.width = width
        family = (WeightSpace() if self.basis else SVGP(RANK)) if self.batched else None
        family = family or (ExactWeightSpace() if self.basis else SGPR(RANK))
        self.exact = name in ("GP", "DKL")
        self.guide = None if self.exact else AutoSparseGP(self.model, family)

    def kernel(self, x):
        """The kernel, and the inputs that it is for."""
        if self.network is not None:
            pyro.module("network", self.network)
        if self.basis:
            return kernels.DeepBasis(self.network, self.correction), x
        length = bench.positive("length", x.new_full((self.width,), math.sqrt(self.width)))
        scale = bench.positive("scale", x.new_ones(()))
        return scale * kernels.RBF(length), x if self.network is None else self.network(x)

    def noise(self, x):
        """The noise variance."""
        return FLOOR + bench.positive("noise", x.new_full((), 1e-2))

    def model(self, x, y=None, size=None):
        """Regression with Gaussian noise."""
        f = pyro.sample("f", GaussianProcess(*self.kernel(x)))
        with pyro.plate("data", size or len(x), subsample=x):
            return pyro.sample("y", dist.Normal(f, self.noise(x).sqrt()), obs=y)

    def loss(self, x, y, size=None):
        """Minus the bound, or minus the log evidence, of one datum."""
        if self.guide is None:
            kernel, z = self.kernel(x)
            process = GaussianProcess(kernel + kernels.White(self.noise(x)), z)
            return -process.log_prob(y) / len(x)
        value = self.bound(x, y, size=size) if size else self.bound(x, y)
        return value / (size or len(x))

    def start(self, x, y, rate, rest):
        """The first call, and the optimiser: weight decay and a rate of its own for the network."""
        if self.guide is not None:
            self.guide(x, y)
            self.bound = TraceQuadrature_ELBO(2)(self.model, self.guide)
        rows = slice(None) if not self.exact else slice(64)
        self.loss(x[rows], y[rows])
        own = [] if self.network is None else list(self.network.parameters())
        ids = {id(p) for p in own}
        others = [*([] if self.guide is None else self.guide.parameters()), *_store().values()]
        others = list({id(p): p for p in others if id(p) not in ids}.values())
        groups = [{"params": own, "lr": rate, "weight_decay": 1e-4}, {"params": others, "lr": rest}]
        return torch.optim.Adam([group for group in groups if group["params"]])

    @torch.no_grad()
    def predict(self, new, x, y):
        """Mean and variance of y."""
        if self.guide is not None:
            q = self.guide.posterior(new)["f"]
            return q.mean, q.variance + self.noise(new)
        kernel, z = self.kernel(x)
        at = new if self.network is None else self.network(new)
        given = GaussianProcess(kernel + kernels.White(self.noise(x)), z).given(z, y).at(at)
        return given.mean, given.variance

    def state(self):
        """A copy of all that training changes."""
        own = {id(p) for p in self.guide.parameters()} if self.guide else ()  # the guide's name is another next time
        store = {name: p.detach().clone() for name, p in _store().items() if id(p) not in own}
        guide = None if self.guide is None else copy.deepcopy(self.guide.state_dict())
        return [store, guide]

    def restore(self, state):
        """Go back to a copy."""
        with torch.no_grad():
            here = _store()
            for name, value in state[0].items():
                here[name].copy_(value)
        if self.guide is not None:
            self.guide.load_state_dict(state[1])


def _store():
    return dict(pyro.get_param_store().named_parameters())


def scores(mean, variance, y):
    """MAE, RMSE and NLL."""
    density, rmse, _ = bench.scores(mean, variance, y)
    return float((y - mean).abs().mean()), rmse, -density


def unevenness(method, x):
    """By how much the mean squared norm of features is below the largest, which the correction makes up for."""
    if not method.basis:
        return 0.0
    norms = method.network(x[:4096]).square().sum(-1)
    return float(1 - norms.mean() / norms.max())


def fit(method, train, valid, test, options, path):
    """Train for a time or a number of iterations, and go back to the best state; seconds, iterations and curve."""
    x, y = train
    optimiser = method.start(x, y, options.rate, options.rest)
    run = {"spent": 0.0, "count": 0, "check": 0.0, "best": (math.inf, None), "curve": []} | bench.kept(path)
    if "now" in run:
        method.restore(run["now"])
        optimiser.load_state_dict(run["optimiser"])
        torch.set_rng_state(run["random"])
    batches = bench.epochs(len(x), 256)
    while run["spent"] < options.seconds and run["count"] < options.iterations:
        begin = bench.clock(x.device)
        arguments = x, y
        if method.batched:
            rows = next(batches).to(x.device)
            arguments = x[rows], y[rows], len(x)
        loss = optimiser.step(bench.descending(optimiser, lambda arguments=arguments: method.loss(*arguments)))
        run["spent"], run["count"] = run["spent"] + bench.clock(x.device) - begin, run["count"] + 1
        share = max(run["spent"] / options.seconds, run["count"] / options.iterations)
        if share > run["check"] or share >= 1:
            run["check"] = share + 0.04
            nll = scores(*method.predict(valid[0], x, y), valid[1])[2]
            tested = scores(*method.predict(test[0], x, y), test[1])
            with torch.no_grad():
                more = float(loss), unevenness(method, x), float(method.noise(x).sqrt())
            run["curve"].append((run["count"], run["spent"], *tested, *more))
            bench.tell(run["curve"][-1])
            if nll < run["best"][0]:
                run["best"] = nll, method.state()
            now = {"now": method.state(), "optimiser": optimiser.state_dict(), "random": torch.get_rng_state()}
            bench.keep(path, run | now)
    if run["best"][1] is not None:
        method.restore(run["best"][1])
    return run["spent"], run["count"]


def split(path, seed, device):
    """70/10/20 % of the rows, scaled before splitting."""
    x, y = bench.read(path)
    low, high = x.amin(0), x.amax(0)
    x = (2 * (x - low) / (high - low).clamp(min=1e-12) - 1)[:, high > low].float().to(device)
    y = ((y - y.mean()) / y.std()).float().to(device)
    order = bench.shuffled(len(x), seed)
    cuts = [0, round(0.7 * len(x)), round(0.8 * len(x)), len(x)]
    return [(x[order[a:b]], y[order[a:b]]) for a, b in itertools.pairwise(cuts)]


def spread(column, digits):
    """Mean, and standard deviation if there are several."""
    mean = f"{statistics.mean(column):.{digits}f}"
    return mean if len(column) == 1 else f"{mean} ± {statistics.stdev(column):.{digits}f}"


def table(options):
    """Table 1."""
    page = bench.Page(options.out)
    page.say(
        f"{bench.machine(options.device)}, float32; rates {options.rate:g} for networks and {options.rest:g} for the "
        f"rest; at most {options.seconds:g} s or {options.iterations} iterations a method; {options.seeds} seeds.",
        "",
    )
    page.head(
        *("set (rows)", "method", "MAE", "RMSE", "NLL", "seconds", "iterations"),
        "paper: MAE, RMSE, NLL, seconds (V100)",
    )
    for name, label in itertools.product(options.sets, options.methods):
        found, rows, failure = [], 0, ""
        for seed in range(options.seeds):
            train, valid, test = split(options.data / f"{name}.npz", seed, options.device)
            method = Method(label, ResNet, train[0], seed)
            train = tuple(part[: options.exact_rows] if method.exact else part for part in train)
            rows = len(train[0])
            limits = (float(options.rate), float(options.rest), float(options.seconds), options.iterations)
            path = bench.place(options, name, label, seed, *limits)
            try:
                spent, count = fit(method, train, valid, test, options, path)
                found.append((*scores(*method.predict(test[0], *train), test[1]), spent, count))
            except (ValueError, RuntimeError) as error:
                failure += f"seed {seed} failed: {str(error).splitlines()[0][:80]}"
        theirs = ", ".join(f"{value:g}" for value in PAPER[name].get(label, ())) or "–"
        cells = [spread(column, digits) for column, digits in zip(zip(*found), (4, 4, 4, 0, 0))]
        page.row(f"{name} ({rows})", label, *(cells or [""] * 5), theirs + failure)


def main():
    options = bench.parsed(
        __doc__,
        data=Path,
        device="cpu",
        rate=1e-3,  # of networks
        rest=1e-3,  # of all else
        keep=None,
        out=None,
        sets=["pol", "protein"],
        methods=METHODS,
        seconds=60.0,
        iterations=10_000,
        seeds=1,
        exact_rows=3000,  # of GP and DKL
    )
    pyro.enable_validation(False)
    table(options)


if __name__ == "__main__":
    main()
