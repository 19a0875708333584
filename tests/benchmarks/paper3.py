"""Paper 3's table 1 and its 1-D function on this machine: deep basis kernels against GPs, sparse GPs and deep kernels.

python tests/benchmarks/paper3.py table --data DIR [--sets pol protein] [--seconds 60] [--seeds 2 1] [--out paper3.md]
python tests/benchmarks/paper3.py function [--iterations 10000] [--plot paper3.png] [--out paper3.md]

--out names a file with a pair of lines ``<!-- table -->`` and ``<!-- end table -->`` (or ``function``): what
stands between them is replaced.

DIR holds ``<set>.npz`` with X and y. As in the paper: inputs to [-1, 1] and targets to mean 0 and variance 1 before
splitting 70/10/20 at random; tanh networks of two layers of 128 (a ResNet, for the function an MLP); r = 128 basis
functions or inducing points; deep kernels with two features, an RBF, learned inducing points; lengths start at the
root of their number; noise variance from 1e-2, above 1e-6; Adam, weight decay 1e-4 on the network; batches of 256;
the state of the best validation NLL is tested. Other than there, each method has ``--seconds`` of training on this
machine (of the process on a CPU, by the clock on a GPU) in place of up to 10,000 iterations or 2,000 epochs, the
optimiser sees the bound per datum, and GP and DKL, exact by Cholesky, see ``--exact-rows`` of the training rows.

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


def mlp(inputs, outputs):
    """Two tanh layers."""
    return nn.Sequential(
        nn.Linear(inputs, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, outputs)
    )


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
        store = {name: p.detach().clone() for name, p in _store().items()}
        guide = None if self.guide is None else copy.deepcopy(self.guide.state_dict())
        return [store, guide]

    def restore(self, state):
        """Go back to a copy."""
        with torch.no_grad():
            for name, p in _store().items():
                p.copy_(state[0][name])
        if self.guide is not None:
            self.guide.load_state_dict(state[1])


def _store():
    return dict(pyro.get_param_store().named_parameters())


def scores(mean, variance, y):
    """MAE, RMSE and NLL."""
    density, rmse, _ = bench.scores(mean, variance, y)
    return float((y - mean).abs().mean()), rmse, -density


def fit(method, train, valid, options, seconds, iterations):
    """Train for a time or a number of iterations, and go back to the best state; seconds and iterations."""
    x, y = train
    optimiser = method.start(x, y, options.rate, options.rest)
    spent, count, check, best = 0.0, 0, seconds / 20, (math.inf, None)
    batches = bench.epochs(len(x), 256)
    while spent < seconds and count < iterations:
        begin = bench.clock(x.device)
        arguments = x, y
        if method.batched:
            rows = next(batches).to(x.device)
            arguments = x[rows], y[rows], len(x)
        optimiser.step(bench.descending(optimiser, lambda arguments=arguments: method.loss(*arguments)))
        spent, count = spent + bench.clock(x.device) - begin, count + 1
        if valid is not None and (spent > check or spent >= seconds or count == iterations):
            check += seconds / 20
            nll = scores(*method.predict(valid[0], x, y), valid[1])[2]
            if nll < best[0]:
                best = nll, method.state()
    if best[1] is not None:
        method.restore(best[1])
    return spent, count


def split(path, seed, device):
    """70/10/20 % of the rows, scaled before splitting."""
    x, y = bench.read(path)
    low, high = x.amin(0), x.amax(0)
    x = (2 * (x - low) / (high - low).clamp(min=1e-12) - 1)[:, high > low].float().to(device)
    y = ((y - y.mean()) / y.std()).float().to(device)
    order = bench.shuffled(len(x), seed)
    cuts = [0, round(0.7 * len(x)), round(0.8 * len(x)), len(x)]
    return [(x[order[a:b]], y[order[a:b]]) for a, b in itertools.pairwise(cuts)]


class Section(bench.Page):
    """Lines that stand in their place in the file at --out."""

    def __init__(self, options, name, what, heads):
        super().__init__()
        self.file, self.marks = options.out, (f"<!-- {name} -->\n", f"<!-- end {name} -->\n")
        rates = f"float32; rates {options.rate:g} for networks and {options.rest:g} for the rest"
        self.say(f"{bench.machine(options.device)}, {rates}; {what}", "")
        self.head(*heads)

    def say(self, *lines):
        super().say(*lines)
        if self.file:
            before, found, rest = Path(self.file).read_text().partition(self.marks[0])
            _, there, after = rest.partition(self.marks[1])
            if not found or not there:
                raise ValueError(f"{self.file} has no lines {self.marks}")
            text = "\n".join(["", *self.lines, "", ""])
            Path(self.file).write_text(before + self.marks[0] + text + self.marks[1] + after)


def spread(column, digits):
    """Mean, and standard deviation if there are several."""
    mean = f"{statistics.mean(column):.{digits}f}"
    return mean if len(column) == 1 else f"{mean} ± {statistics.stdev(column):.{digits}f}"


def table(options):
    """Table 1."""
    seeds = dict(zip(options.sets, options.seeds * len(options.sets) if len(options.seeds) == 1 else options.seeds))
    shown = ", ".join(f"{name} {number}" for name, number in seeds.items())
    heads = (
        *("set (rows)", "method", "MAE", "RMSE", "NLL", "seconds", "iterations"),
        "paper: MAE, RMSE, NLL, seconds (V100)",
    )
    page = Section(options, "table", f"at most {options.seconds:g} s of training a method; seeds: {shown}.", heads)
    for name, label in itertools.product(options.sets, options.methods):
        found, rows, failure = [], 0, ""
        for seed in range(seeds[name]):
            train, valid, test = split(options.data / f"{name}.npz", seed, options.device)
            method = Method(label, ResNet, train[0], seed)
            train = tuple(part[: options.exact_rows] if method.exact else part for part in train)
            rows = len(train[0])
            try:
                spent, count = fit(method, train, valid, options, options.seconds, 10**6)
                found.append((*scores(*method.predict(test[0], *train), test[1]), spent, count))
            except (ValueError, RuntimeError) as error:
                failure += f"seed {seed} failed: {str(error).splitlines()[0][:80]}"
        theirs = ", ".join(f"{value:g}" for value in PAPER[name].get(label, ())) or "–"
        cells = [spread(column, digits) for column, digits in zip(zip(*found), (4, 4, 4, 0, 0))]
        page.row(f"{name} ({rows})", label, *(cells or [""] * 5), theirs + failure)


def truth(x):
    """The paper's function (section 4.1)."""

    def step(a):
        return torch.sigmoid(200 * (x + a))

    pieces = 0.3 * (1 - step(0.6)) + 0.9 * (step(0.6) - step(0.0)) - 0.6 * (step(0.0) - step(-0.4))
    return pieces + 0.01 * torch.sin(50 * torch.sin(10 * x))


def sample(num, seed, device):
    """Noisy values of the function."""
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(num, 1, generator=generator) - 1
    return x.to(device), (truth(x[:, 0]) + 0.1 * torch.randn(num, generator=generator)).to(device)


@torch.no_grad()
def judge(method, train, test):
    """MAE, RMSE and NLL of test data, the RMSE to the function itself, the bound (or log evidence) of one datum, the
    standard deviation of the noise."""
    mean, variance = method.predict(test[0], *train)
    error = (mean - truth(test[0][:, 0])).square().mean().sqrt()
    own = -float(method.loss(*train)), float(method.noise(train[0]).sqrt())
    return [*scores(mean, variance, test[1]), float(error), *own]


TITLES = {
    "GP": "GP, RBF",
    "DKL": "DKL, RBF base",
    "DBK-c": "DBK without correction",
    "DBK": "DBK with correction",
    "DBK-n": "the same, rows of one norm",
}


def function(options):
    """The 1-D function: figure 1, and the first point of figure 3."""
    x, y = sample(options.points[0], 0, options.device)
    test = sample(1000, 1, options.device)
    grid = torch.linspace(-1, 1, 1000)[:, None].to(options.device)
    figure, axes = bench.pyplot().subplots(2, len(TITLES), figsize=(4 * len(TITLES), 6.5), layout="tight")
    heads = "method", "MAE", "RMSE", "NLL", "RMSE to the function", "bound of one datum", "noise sd", "seconds"
    what = f"n = {len(x)}, {options.iterations} iterations; 1,000 test points."
    page = Section(options, "function", what, heads)
    for (above, below), (label, title) in zip(axes.T, TITLES.items()):
        method = Method(label, mlp, x)
        spent, _ = fit(method, (x, y), None, options, math.inf, options.iterations)
        page.row(label, *(f"{value:.4f}" for value in judge(method, (x, y), test)), f"{spent:.0f}")
        mean, variance = method.predict(grid, x, y)
        t, mean, band = grid[:, 0].cpu(), mean.cpu(), 2 * variance.sqrt().cpu()
        above.plot(x[:, 0].cpu(), y.cpu(), ".", color="0.6", ms=3)
        above.fill_between(t, mean - band, mean + band, alpha=0.3)
        above.plot(t, truth(t), "k--", lw=0.8)
        above.plot(t, mean, "C0", lw=1)
        above.set(title=title, ylim=(-1.3, 1.6))
        with torch.no_grad():
            kernel, z = method.kernel(grid[::5])
            below.imshow(kernel(z, z.clone()).cpu(), extent=(-1, 1, 1, -1), cmap="viridis")
        below.set(title="k(x, x')")
    figure.savefig(options.plot or "paper3.png", dpi=70)


DEFAULTS = {  # seconds, exact rows and points, by the part
    "table": (table, 60.0, 3000, [0]),
    "function": (function, math.inf, 0, [100]),
}


def main():
    options = bench.parsed(
        __doc__,
        *DEFAULTS,
        data=Path(),
        device="cpu",
        rate=1e-3,  # of networks
        rest=1e-3,  # of all else
        out=None,
        sets=["pol", "protein"],
        methods=METHODS,
        seconds=0.0,
        seeds=[1],  # how many, of all sets or of each
        exact_rows=0,  # of GP and DKL
        points=[0],
        iterations=10_000,
        plot=None,
    )
    run, seconds, rows, points = DEFAULTS[options.part]
    options.seconds, options.exact_rows = options.seconds or seconds, options.exact_rows or rows
    options.points = points if options.points == [0] else options.points
    pyro.enable_validation(False)
    run(options)


if __name__ == "__main__":
    main()
