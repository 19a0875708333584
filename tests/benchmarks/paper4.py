"""Paper 4's experiments on this machine: expectation propagation against SVGP, the paper's figures beside ours.

python tests/benchmarks/paper4.py PART --data DIR [--out DIR] [--repeats 3] [--seconds 60] [--device cpu]

PART is table1, banana, image, pima, mnist, flights or tables (which only writes paper4.md from what the others left).
DIR holds the data, ``<set>.npz`` with X and y. Probit likelihood; squared exponential kernel with a length scale a
column (starting at the median distance of inputs), an amplitude (1) and additive noise (0.1); inducing inputs start
at random training rows, the same for all methods. SEP is ExpectationPropagation with damping 0.5 and a rate a
parameter (× 1.02, × 0.5: SignRates); "outer" the same at convergence only, which stands in for the paper's GFITC;
SVGP trains by L-BFGS, as the paper's SVI does, or where data come in mini-batches by the same Adadelta(0.9, 1e-5) as
SEP with damping 0.99, and by Adam(0.01). Times are of training alone.
"""

import itertools
import json
import math
import time
from functools import partial
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


def image(args):
    """NLL against time for three numbers of inducing points."""
    found = {}
    for seed in range(args.repeats):
        data = split(args, "image", seed)
        ways = {"SEP": expectation, "outer": partial(expectation, **OUTER), "SVGP": variational}
        for (num, share), (method, make) in itertools.product({4: 0.3, 50: 0.6, 200: 1.0}.items(), ways.items()):
            pyro.set_rng_seed(seed)
            z = data.inducing(num, seed)
            add(found, f"{num} {method}", curve(make(data, z), data, args.seconds * share))
    plot_curves(args, "image", found, [f"m = {num}" for num in (4, 50, 200)], 1)
    return found


def pima(args):
    """log Z against time: inner and outer updates, matched and exact gradients."""
    data = split(args, "pima_ripley532")
    z, found = data.inducing(300, 0), {}
    for schedule, gradient in itertools.product(("inner", "outer"), ("matched", "exact")):
        options = OUTER | {"schedule": schedule, "gradient": gradient}
        add(found, f"{schedule}, {gradient}", curve(expectation(data, z, **options), data, args.seconds))
    plot_curves(args, "pima", {f"x {key}": value for key, value in found.items()}, ["Pima, m = 300"], 3)
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
    found = stochastic(
        args,
        data,
        lambda data, z: {"SEP, batch": lambda: expectation(data, z), "SVGP, batch": lambda: variational(data, z)},
    )
    plot_curves(args, "mnist", {f"x {key}": value for key, value in found.items()}, ["mnist"], 1)
    return found


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
    plot_curves(args, "flights", {f"x {key}": value for key, value in found.items()}, ["flights"], 1)
    return found


def banana(args):
    """Decision boundaries and inducing points."""
    data, line, found = split(args, "banana"), torch.linspace(-3, 3, 80), {}
    figure, axes = bench.pyplot().subplots(2, 6, figsize=(15, 5), sharex=True, sharey=True, layout="constrained")
    for axis, (method, num) in zip(axes.flat, itertools.product(("SEP", "SVGP"), (4, 8, 16, 32, 64, 128))):
        pyro.set_rng_seed(0)
        z = data.inducing(num, 0)
        guide = trained(expectation(data, z), 250) if method == "SEP" else trained(variational(data, z), 25)
        add(found, f"{num} {method}", data.scores(guide))
        axis.scatter(*data.x.mT.cpu(), c=data.y.cpu(), s=1, cmap="coolwarm", alpha=0.4)
        mean = guide.posterior(torch.cartesian_prod(line, line).to(data.x))["f"].mean.detach()
        axis.contour(line, line, mean.reshape(80, 80).mT.cpu(), levels=[0.0], colors="black")
        axis.plot(*guide.gps.f.basis.inputs[0].detach().mT.cpu(), "k.", markersize=5)
        axis.set_title(f"{method}, m = {num}: {found[f'{num} {method}'][0][0]:.3f}")
    figure.savefig(args.out / "paper4_banana.png", dpi=80)
    return found


def add(found, key, value):
    """One more repeat."""
    found.setdefault(key, []).append(value)
    print(key, value[-1], flush=True)


def plot_curves(args, name, found, titles, what):
    """Means over repeats of column ``what`` against time; keys are "panel method"."""
    panels = list(dict.fromkeys(key.split(" ", 1)[0] for key in found))
    figure, axes = bench.pyplot().subplots(
        1, len(panels), figsize=(5 * len(panels), 3.5), squeeze=False, layout="constrained"
    )
    for axis, panel, title in zip(axes[0], panels, titles):
        for key, curves in found.items():
            if key.split(" ", 1)[0] == panel:
                curves = [np.array(c) for c in curves]
                times = curves[0][:, 0]
                means = np.mean([np.interp(times, c[:, 0], c[:, what]) for c in curves], 0)
                axis.plot(times, -means if what == 3 else means, ".-", label=key.split(" ", 1)[1])
        axis.set(xscale="log", xlabel="seconds", title=title, ylabel={1: "test NLL", 3: "log Z"}[what])
        axis.legend()
    figure.savefig(args.out / f"paper4_{name}.png", dpi=80)


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


def of_image(found):
    rows = []
    for num in (4, 50, 200):
        each = []
        for svgp, ep, slow in zip(found[f"{num} SVGP"], found[f"{num} SEP"], found[f"{num} outer"]):
            end = svgp[-1][1]
            each.append([end, reached(svgp, 1.01 * end), reached(ep, end), ep[-1][1], slow[-1][1]])
        rows.append([num, *(f"{cell:.3g}" for cell in np.mean(each, 0))])
    heads = ["m", "SVGP's NLL", "SVGP", "SEP", "SEP's NLL", "outer's NLL"]
    return bench.table(heads, rows), "SVGP's time is to within 1 % of its end; ∞ is never."


def of_curves(found):
    rows = []
    for key, (line,) in found.items():
        seconds, nll, error = line[-1][:3]
        rows.append([key, f"{seconds:.0f}", f"{error:.2%}", f"{nll:.4f}", f"{before(line, 4)[1]:.4f}"])
    return (bench.table(["method", "seconds", "error", "NLL", "NLL after a quarter of the time"], rows),)


def of_pima(found):
    lines = {key: line for key, (line,) in found.items()}
    rows = [[k, f"{-before(a, 10)[3]:.1f}", f"{-a[-1][3]:.1f}", f"{a[-1][1]:.3f}"] for k, a in lines.items()]
    heads = ["updates, gradient", "log Z at a tenth of the time", "log Z at the end", "test NLL"]
    return (bench.table(heads, rows),)


def of_banana(found):
    return ("Titles give the test NLL.",)


def reached(line, level):
    """When a curve first is at or below a level."""
    return next((point[0] for point in line if point[1] <= level), math.inf)


def before(line, share):
    """The last point of the first share of the time."""
    return ([point for point in line if point[0] <= line[-1][0] / share] or line[:1])[-1]


PARTS = {  # what runs, the section's title and what it says of the figures
    "table1": (table1, "Table 1: test NLL after 250 iterations", of_table1),
    "image": (image, "Image: seconds to SVGP's final NLL", of_image),
    "mnist": (
        mnist,
        "MNIST, odd against even (the paper, by all data: SEP 2.7 % and 0.0694, SVI 2.2 % and 0.0655)",
        of_curves,
    ),
    "flights": (flights, "Flights, Houston 2011, late or not", of_curves),
    "pima": (pima, "Figure 1: Pima (Ripley's), m = 300", of_pima),
    "banana": (banana, "Figure 2: banana", of_banana),
}


def write(args):
    """paper4.md from the parts' figures."""
    page = bench.Page(args.out / "paper4.md")
    page.say("# Paper 4 (scalable expectation propagation)", "", "Made by `python tests/benchmarks/paper4.py PART`.")
    for name, (_, title, text) in PARTS.items():
        path = args.out / f"paper4_{name}.json"
        if path.exists():
            part = json.loads(path.read_text())
            page.say("", f"## {title}, {part['on']}", "")
            picture = [] if name == "table1" else [f"![](paper4_{name}.png)"]
            page.say("\n\n".join([*picture, *text(part["found"])]))


def main():
    args = bench.parsed(
        __doc__,
        *PARTS,
        "tables",
        data=Path(),
        out=bench.HERE,
        repeats=3,
        seconds=60.0,
        sets=list(SETS),
        device="cpu",
    )
    args.out.mkdir(parents=True, exist_ok=True)
    if args.part != "tables":
        found = PARTS[args.part][0](args)
        path = args.out / f"paper4_{args.part}.json"
        path.write_text(json.dumps({"on": bench.machine(args.device), "found": found}))
    write(args)


if __name__ == "__main__":
    main()
