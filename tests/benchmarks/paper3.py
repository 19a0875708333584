"""Paper 3's table 1 and its 1-D function on this machine: deep basis kernels against GPs, sparse GPs and deep kernels.

python tests/benchmarks/paper3.py table --data DIR [--sets pol protein] [--seconds 60] [--seeds 2 1] [--out paper3.md]
python tests/benchmarks/paper3.py function [--iterations 10000] [--plot paper3.png] [--out paper3.md]
python tests/benchmarks/paper3.py sweep [--seconds 15] [--points 100 10000] [--plot paper3_sweep.png] [--out paper3.md]

--out names a file with a pair of lines ``<!-- table -->`` and ``<!-- end table -->`` (or ``function``, ``sweep``): what
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

import argparse
import copy
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.distributions import constraints

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

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inputs, WIDTH), nn.Linear(WIDTH, outputs)
        self.middle = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        """(N, D) to (N, r)."""
        h = self.first(x)
        for layer in self.middle:
            h = h + torch.tanh(layer(h))
        return self.last(h)


def mlp(inputs: int, outputs: int) -> nn.Module:
    """Two tanh layers."""
    return nn.Sequential(
        nn.Linear(inputs, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, outputs)
    )


class EvenRows(nn.Module):
    """A network's outputs, each row scaled to one learned norm."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.log_norm = network, nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """(N, D) to (N, r)."""
        return self.log_norm.exp() * nn.functional.normalize(self.network(x), dim=-1)


class Method:
    """A model with its guide: what is trained, and its predictions.

    :param name: as in table 1; "SV" is trained by batches, "-c" has no correction, "-r" one basis function, "-n" rows
        of one learned norm.
    :param network: makes a network of given inputs and outputs.
    """

    def __init__(self, name: str, network: Callable[[int, int], nn.Module], x: Tensor) -> None:
        pyro.clear_param_store()
        self.name, self.batched = name, name.startswith("SV")
        flags = name.partition("-")[2]
        self.basis, self.deep = "DBK" in name, "DK" in name or "DBK" in name
        self.correction = "c" not in flags
        self.network: Optional[nn.Module] = None
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

    def kernel(self, x: Tensor) -> Any:
        """The kernel, and the inputs that it is for."""
        if self.network is not None:
            pyro.module("network", self.network)
        if self.basis:
            return kernels.DeepBasis(self.network, self.correction), x
        start = x.new_full((self.width,), math.sqrt(self.width))
        length = pyro.param("length", start, constraint=constraints.positive)
        scale = pyro.param("scale", x.new_ones(()), constraint=constraints.positive)
        return scale * kernels.RBF(length), x if self.network is None else self.network(x)

    def noise(self, x: Tensor) -> Tensor:
        """The noise variance."""
        return FLOOR + pyro.param("noise", x.new_full((), 1e-2), constraint=constraints.positive)

    def model(self, x: Tensor, y: Optional[Tensor] = None, size: Optional[int] = None) -> Any:
        """Regression with Gaussian noise."""
        f = pyro.sample("f", GaussianProcess(*self.kernel(x)))
        with pyro.plate("data", size or len(x), subsample=x):
            return pyro.sample("y", dist.Normal(f, self.noise(x).sqrt()), obs=y)

    def loss(self, x: Tensor, y: Tensor, size: Optional[int] = None) -> Tensor:
        """Minus the bound, or minus the log evidence, of one datum."""
        if self.guide is None:
            kernel, z = self.kernel(x)
            process = GaussianProcess(kernel + kernels.White(self.noise(x)), z)
            return -process.log_prob(y) / len(x)
        value = self.bound(x, y, size=size) if size else self.bound(x, y)
        return value / (size or len(x))

    def start(self, x: Tensor, y: Tensor, rate: float, rest: float) -> torch.optim.Optimizer:
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
    def predict(self, new: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of y."""
        if self.guide is not None:
            q = self.guide.posterior(new)["f"]
            return q.mean, q.variance + self.noise(new)
        kernel, z = self.kernel(x)
        at = new if self.network is None else self.network(new)
        given = GaussianProcess(kernel + kernels.White(self.noise(x)), z).given(z, y).at(at)
        return given.mean, given.variance

    def state(self) -> list[Any]:
        """A copy of all that training changes."""
        store = {name: p.detach().clone() for name, p in _store().items()}
        guide = None if self.guide is None else copy.deepcopy(self.guide.state_dict())
        return [store, guide]

    def restore(self, state: list[Any]) -> None:
        """Go back to a copy."""
        with torch.no_grad():
            for name, p in _store().items():
                p.copy_(state[0][name])
        if self.guide is not None:
            self.guide.load_state_dict(state[1])


def _store() -> dict[str, Tensor]:
    return dict(pyro.get_param_store().named_parameters())


def scores(mean: Tensor, variance: Tensor, y: Tensor) -> tuple[float, float, float]:
    """MAE, RMSE and NLL."""
    nll = 0.5 * (math.log(2 * math.pi) + variance.log() + (y - mean).square() / variance).mean()
    return float((y - mean).abs().mean()), float((y - mean).square().mean().sqrt()), float(nll)


def fit(
    method: Method, train: tuple, valid: Optional[tuple], seconds: float, iterations: int, rate: float, rest: float
) -> tuple[float, int]:
    """Train for a time or a number of iterations, and go back to the best state; seconds and iterations."""
    x, y = train
    # On a CPU the seconds of the process: other jobs on the machine count for less.
    clock = time.perf_counter if x.is_cuda else time.process_time
    optimiser = method.start(x, y, rate, rest)
    spent, count, check, best = 0.0, 0, seconds / 20, (math.inf, None)
    order: list[Tensor] = []
    while spent < seconds and count < iterations:
        begin = clock()
        arguments: tuple = (x, y)
        if method.batched:
            order = order or list(torch.randperm(len(x), device=x.device).split(256))
            rows = order.pop()
            arguments = (x[rows], y[rows], len(x))
        optimiser.zero_grad()
        loss = method.loss(*arguments)
        loss.backward()
        optimiser.step()
        if x.is_cuda:
            torch.cuda.synchronize()
        spent, count = spent + clock() - begin, count + 1
        if valid is not None and (spent > check or spent >= seconds or count == iterations):
            check += seconds / 20
            nll = scores(*method.predict(valid[0], x, y), valid[1])[2]
            if nll < best[0]:
                best = nll, method.state()
    if best[1] is not None:
        method.restore(best[1])
    return spent, count


def split(path: Path, seed: int, device: str) -> dict[str, tuple[Tensor, Tensor]]:
    """70/10/20 % of the rows, scaled before splitting."""
    z = np.load(path)
    x, y = (torch.from_numpy(z[key]).double() for key in ("X", "y"))
    low, high = x.amin(0), x.amax(0)
    x = (2 * (x - low) / (high - low).clamp(min=1e-12) - 1)[:, high > low].float().to(device)
    y = ((y - y.mean()) / y.std()).float().to(device)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    cuts = [0, round(0.7 * len(x)), round(0.8 * len(x)), len(x)]
    rows = {name: order[a:b] for name, a, b in zip(("train", "valid", "test"), cuts, cuts[1:])}
    return {name: (x[index], y[index]) for name, index in rows.items()}


def write(options: argparse.Namespace, section: str, lines: list[str]) -> None:
    """Put lines into their place in the file at --out."""
    print(lines[-1], flush=True)
    if options.out is None:
        return
    begin, end = f"<!-- {section} -->\n", f"<!-- end {section} -->\n"
    before, found, rest = options.out.read_text().partition(begin)
    _, there, after = rest.partition(end)
    if not found or not there:
        raise ValueError(f"{options.out} has no lines {begin.strip()!r} and {end.strip()!r}")
    options.out.write_text(before + begin + "\n".join(["", *lines, "", ""]) + end + after)


def machine(options: argparse.Namespace) -> str:
    """What the run was made on and with."""
    return (
        f"{platform.machine()}, {options.device}, {torch.get_num_threads()} thread(s), torch {torch.__version__}, "
        f"float32; rates {options.rate:g} for networks and {options.rest:g} for the rest"
    )


def spread(column: Sequence[float], digits: int) -> str:
    """Mean, and standard deviation if there are several."""
    mean = f"{statistics.mean(column):.{digits}f}"
    return mean if len(column) == 1 else f"{mean} ± {statistics.stdev(column):.{digits}f}"


def table(options: argparse.Namespace) -> None:
    """Table 1."""
    seeds = dict(zip(options.sets, options.seeds * len(options.sets) if len(options.seeds) == 1 else options.seeds))
    lines = [
        f"{machine(options)}; at most {options.seconds:g} s of training a method; seeds: "
        + ", ".join(f"{name} {number}" for name, number in seeds.items())
        + ".",
        "",
        "| set (rows) | method | MAE | RMSE | NLL | seconds | iterations | paper: MAE, RMSE, NLL, seconds (V100) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in options.sets:
        for label in options.methods or METHODS:
            found, rows, failure = [], 0, ""
            for seed in range(seeds[name]):
                parts = split(options.data / f"{name}.npz", seed, options.device)
                torch.manual_seed(seed)
                pyro.set_rng_seed(seed)
                method = Method(label, ResNet, parts["train"][0])
                train = tuple(part[: options.exact_rows] if method.exact else part for part in parts["train"])
                rows = len(train[0])
                try:
                    spent, count = fit(
                        method, train, parts["valid"], options.seconds, 10**6, options.rate, options.rest
                    )
                    found.append((*scores(*method.predict(parts["test"][0], *train), parts["test"][1]), spent, count))
                except (ValueError, RuntimeError) as error:
                    failure += f"seed {seed} failed: {str(error).splitlines()[0][:80]}"
            theirs = ", ".join(f"{value:g}" for value in PAPER[name].get(label, ())) or "–"
            cells = [spread(column, digits) for column, digits in zip(zip(*found), (4, 4, 4, 0, 0))]
            cells = cells or ["", "", "", "", ""]
            lines.append(f"| {name} ({rows}) | {label} | {' | '.join(cells)} | {theirs} |{failure}")
            write(options, "table", lines)


def truth(x: Tensor) -> Tensor:
    """The paper's function (section 4.1)."""

    def step(a: float) -> Tensor:
        return torch.sigmoid(200 * (x + a))

    pieces = 0.3 * (1 - step(0.6)) + 0.9 * (step(0.6) - step(0.0)) - 0.6 * (step(0.0) - step(-0.4))
    return pieces + 0.01 * torch.sin(50 * torch.sin(10 * x))


def sample(num: int, seed: int, device: str) -> tuple[Tensor, Tensor]:
    """Noisy values of the function."""
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(num, 1, generator=generator) - 1
    return x.to(device), (truth(x[:, 0]) + 0.1 * torch.randn(num, generator=generator)).to(device)


@torch.no_grad()
def judge(method: Method, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> list[float]:
    """MAE, RMSE and NLL of test data, the RMSE to the function itself, the bound (or log evidence) of one datum, the
    standard deviation of the noise."""
    mean, variance = method.predict(test[0], *train)
    error = (mean - truth(test[0][:, 0])).square().mean().sqrt()
    return [
        *scores(mean, variance, test[1]),
        float(error),
        -float(method.loss(*train)),
        float(method.noise(train[0]).sqrt()),
    ]


TITLES = {
    "GP": "GP, RBF",
    "DKL": "DKL, RBF base",
    "DBK-c": "DBK without correction",
    "DBK": "DBK with correction",
    "DBK-n": "the same, rows of one norm",
}


def function(options: argparse.Namespace) -> None:
    """The 1-D function: figure 1, and the first point of figure 3."""
    x, y = sample(options.points, 0, options.device)
    test = sample(1000, 1, options.device)
    grid = torch.linspace(-1, 1, 1000)[:, None].to(options.device)
    figure, axes = _pyplot().subplots(2, len(TITLES), figsize=(4 * len(TITLES), 6.5))
    lines = [
        f"{machine(options)}; n = {options.points}, {options.iterations} iterations; 1,000 test points.",
        "",
        "| method | MAE | RMSE | NLL | RMSE to the function | bound of one datum | noise sd | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for column, (label, title) in enumerate(TITLES.items()):
        torch.manual_seed(0)
        pyro.set_rng_seed(0)
        method = Method(label, mlp, x)
        spent, _ = fit(method, (x, y), None, math.inf, options.iterations, options.rate, options.rest)
        cells = " | ".join(f"{value:.4f}" for value in judge(method, (x, y), test))
        lines.append(f"| {label} | {cells} | {spent:.0f} |")
        write(options, "function", lines)
        mean, variance = method.predict(grid, x, y)
        t, mean, band = grid[:, 0].cpu(), mean.cpu(), 2 * variance.sqrt().cpu()
        axis = axes[0, column]
        axis.plot(x[:, 0].cpu(), y.cpu(), ".", color="0.6", ms=3)
        axis.fill_between(t, mean - band, mean + band, alpha=0.3)
        axis.plot(t, truth(t), "k--", lw=0.8)
        axis.plot(t, mean, "C0", lw=1)
        axis.set(title=title, ylim=(-1.3, 1.6))
        with torch.no_grad():
            kernel, z = method.kernel(grid[::5])
            matrix = kernel(z, z.clone()).cpu()
        axes[1, column].imshow(matrix, extent=(-1, 1, 1, -1), cmap="viridis")
        axes[1, column].set(title="k(x, x')")
    figure.tight_layout()
    figure.savefig(options.plot, dpi=70)


def sweep(options: argparse.Namespace) -> None:
    """Figure 3: errors and time against the number of points."""
    lines = [
        f"{machine(options)}; at most {options.seconds:g} s of training or {options.iterations} iterations; 1,000 test "
        "points.",
        "",
        "| n | method | MAE | RMSE | NLL | RMSE to the function | iterations | seconds for 1,000 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    found: dict[str, list[tuple]] = {}
    for num in options.points:
        train, test = sample(num, 0, options.device), sample(1000, 1, options.device)
        for label in TITLES:
            if label in ("GP", "DKL") and num > options.exact_rows:
                continue
            torch.manual_seed(0)
            pyro.set_rng_seed(0)
            method = Method(label, mlp, train[0])
            spent, count = fit(method, train, None, options.seconds, options.iterations, options.rate, options.rest)
            judged = judge(method, train, test)[:4]
            found.setdefault(label, []).append((num, *judged, 1000 * spent / count))
            cells = " | ".join(f"{value:.4f}" for value in judged)
            lines.append(f"| {num} | {label} | {cells} | {count} | {1000 * spent / count:.1f} |")
            write(options, "sweep", lines)
    figure, axes = _pyplot().subplots(1, 3, figsize=(13, 3.5))
    for axis, (place, title) in zip(axes, [(4, "RMSE to the function"), (3, "NLL"), (5, "seconds for 1,000 steps")]):
        for label, rows in found.items():
            axis.plot([row[0] for row in rows], [row[place] for row in rows], ".-", label=label)
        axis.set(xscale="log", xlabel="n", title=title, yscale="linear" if place == 3 else "log")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(options.plot, dpi=70)


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(required=True)
    of_table, of_function, of_sweep = (what.add_parser(name) for name in ("table", "function", "sweep"))
    for each in (of_table, of_function, of_sweep):
        each.add_argument("--device", default="cpu")
        each.add_argument("--rate", type=float, default=1e-3, help="of networks")
        each.add_argument("--rest", type=float, default=1e-3, help="the rate of all else")
        each.add_argument("--out", type=Path, default=None)
    of_table.add_argument("--data", type=Path, required=True)
    of_table.add_argument("--sets", nargs="+", default=["pol", "protein"])
    of_table.add_argument("--methods", nargs="+", default=None)
    of_table.add_argument("--seconds", type=float, default=60.0)
    of_table.add_argument("--seeds", type=int, nargs="+", default=[1], help="how many, of all sets or of each")
    of_table.add_argument("--exact-rows", type=int, default=3000)
    of_table.set_defaults(run=table)
    of_function.add_argument("--points", type=int, default=100)
    of_function.add_argument("--iterations", type=int, default=10_000)
    of_function.add_argument("--plot", type=Path, default=Path("paper3.png"))
    of_function.set_defaults(run=function)
    of_sweep.add_argument("--points", type=int, nargs="+", default=[100, 316, 1000, 3162, 10_000, 31_623, 100_000])
    of_sweep.add_argument("--iterations", type=int, default=10_000)
    of_sweep.add_argument("--seconds", type=float, default=15.0)
    of_sweep.add_argument("--exact-rows", type=int, default=1000, help="beyond, no GP and no DKL")
    of_sweep.add_argument("--plot", type=Path, default=Path("paper3_sweep.png"))
    of_sweep.set_defaults(run=sweep)
    options = parser.parse_args()
    pyro.enable_validation(False)
    options.run(options)


if __name__ == "__main__":
    main()
