"""Paper 2's table 1 on this machine: exact GP, SGPR, SVGP, GPyTorch's CG-based GP, CaGP-CG and CaGP-Opt side by side.

python tests/benchmarks/paper2.py --data DIR [--sets parkinsons bike] [--seconds 120] [--keep RUNS] [--out table.md]
    [--device cuda]

DIR holds ``<set>.npz`` with X, y and packed official test masks (UCI). Split 0; inputs and targets standardised from
the training rows; Matern-3/2, a length scale a column, an output scale, a noise, starting at 1, 1 and 0.3. A tenth
of the training rows is the validation set that chooses the rate and the epoch (the paper used the test set); the
chosen model, trained on the other nine tenths, is tested as it is. Each (method, rate) gets ``--seconds`` of training
on this machine instead of the paper's number of epochs; rates fall linearly to a tenth over them. Under ``--keep``
are the runs, with their curves: the same command goes on where they were cut.
"""

import copy
import math
import warnings
from pathlib import Path

import bench
import gpytorch
import pyro
import torch
from others import Exact, matern

from pyro_sparsegp import AutoSparseGP, TraceQuadrature_ELBO
from pyro_sparsegp.families import SGPR, SVGP, ComputationAware

# Paper 2, table 1: NLL, RMSE, time on a V100.
PAPER = {
    ("parkinsons", "exact"): (-3.645, 0.001, "1m03s"),
    ("parkinsons", "SGPR"): (-2.837, 0.031, "27s"),
    ("parkinsons", "SGPR L-BFGS"): (-3.245, 0.007, "2m14s"),
    ("parkinsons", "SVGP"): (-2.858, 0.006, "2m25s"),
    ("parkinsons", "CGGP"): (-2.663, 0.019, "1m12s"),
    ("parkinsons", "CaGP-CG"): (-2.936, 0.009, "1m44s"),
    ("parkinsons", "CaGP-Opt"): (-3.384, 0.004, "1m27s"),
    ("parkinsons", "CaGP-Opt L-BFGS"): (-3.449, 0.002, "1m53s"),
    ("bike", "SGPR"): (-2.121, 0.026, "4m03s"),
    ("bike", "SVGP"): (-2.256, 0.020, "6m41s"),
    ("bike", "CaGP-CG"): (-2.042, 0.024, "5m17s"),
    ("bike", "CaGP-Opt"): (-2.401, 0.018, "8m10s"),
    ("protein", "SGPR"): (0.844, 0.561, "10m25s"),
    ("protein", "SVGP"): (0.851, 0.564, "17m19s"),
    ("protein", "CaGP-Opt"): (0.829, 0.545, "13m48s"),
    ("keggundirected", "SGPR"): (-0.681, 0.123, "2m04s"),
    ("keggundirected", "SVGP"): (-0.710, 0.118, "24m21s"),
    ("keggundirected", "CaGP-Opt"): (-0.693, 0.120, "22m03s"),
}
MODEL = bench.regression(1.0)


def load(options, name):
    """Split 0: rows to train on, a tenth of them for validation, and those for tests."""
    path = options.data / f"{name}.npz"
    (x, y), test = bench.read(path), bench.official(path)
    rows = (~test).nonzero()[:, 0][bench.shuffled(int((~test).sum()))]
    fit, valid = rows[len(rows) // 10 :], rows[: len(rows) // 10]
    x, y = bench.standardised(x, y, fit)
    x, y = x.to(options.device), y.to(options.device)
    return [(x[part], y[part]) for part in (fit[: options.rows], valid, test)]


# Trainers: of rows and a rate an epoch, an optimiser whose rate may fall, a predictor and the noise.


def ours(family, batch=0, lbfgs=False):
    """Our families."""

    def trainer(x, y, rate):
        pyro.clear_param_store()
        guide = AutoSparseGP(MODEL, family(len(x)))
        guide.prepare(x, y)
        loss = TraceQuadrature_ELBO(2)(MODEL, guide)
        parameters = [*guide.parameters(), *dict(pyro.get_param_store().named_parameters()).values()]
        parameters = list({id(p): p for p in parameters}.values())
        if lbfgs:
            optimiser = torch.optim.LBFGS(parameters, rate, max_iter=5, history_size=20, line_search_fn="strong_wolfe")
        else:
            optimiser = torch.optim.Adam(parameters, rate)
        size = {"size": len(x)} if batch else {}

        def epoch():
            for rows in torch.randperm(len(x)).split(batch) if batch else [slice(None)]:
                optimiser.step(bench.descending(optimiser, lambda rows=rows: loss(x[rows], y[rows], **size)))

        return epoch, optimiser, lambda new: bench.predicted(guide, new), lambda: pyro.param("noise").item()

    return trainer


def with_gpytorch(cg):
    """GPyTorch's exact GP, trained by Cholesky or by conjugate gradients."""

    def trainer(x, y, rate):
        gp = Exact(x, y, matern(x.shape[-1], 1.0, 1.0), gpytorch.likelihoods.GaussianLikelihood()).to(x)
        gp.likelihood.noise_covar.register_constraint("raw_noise", gpytorch.constraints.Positive())
        gp.likelihood.noise = 0.09
        objective = gpytorch.mlls.ExactMarginalLogLikelihood(gp.likelihood, gp)
        optimiser = torch.optim.Adam(gp.parameters(), rate)

        def epoch():
            gp.train()
            size, tolerance = (0, 1e-4) if cg else (10**6, 1.0)
            with gpytorch.settings.max_cholesky_size(size), gpytorch.settings.cg_tolerance(tolerance):
                optimiser.step(bench.descending(optimiser, lambda: -objective(gp(x), y)))

        @torch.no_grad()
        def predict(new):
            gp.eval()  # exactly, in double precision: by conjugate gradients it takes minutes here
            fitted = copy.deepcopy(gp).double()
            fitted.set_train_data(x.double(), y.double(), strict=False)
            with gpytorch.settings.max_cholesky_size(10**6):
                out = fitted.likelihood(fitted(new.double()))
                return out.mean, out.variance.clamp(min=1e-8)

        return epoch, optimiser, predict, lambda: gp.likelihood.noise.sqrt().item()

    return trainer


METHODS = {  # a trainer, its precision, and the sets that it can do
    "exact": (with_gpytorch(cg=False), torch.float64, ("parkinsons",)),
    "SGPR": (ours(lambda num: SGPR(min(1024, num // 2))), torch.float32, ()),
    "SGPR L-BFGS": (ours(lambda num: SGPR(min(1024, num // 2)), lbfgs=True), torch.float64, ("parkinsons",)),
    "SVGP": (ours(lambda num: SVGP(min(1024, num // 2)), batch=1024), torch.float32, ()),
    "CGGP": (with_gpytorch(cg=True), torch.float32, ("parkinsons",)),
    "CaGP-CG": (ours(lambda num: ComputationAware(min(512, num), "cg")), torch.float32, ("parkinsons", "bike")),
    "CaGP-Opt": (ours(lambda num: ComputationAware(min(512, num))), torch.float32, ()),
    "CaGP-Opt, batches": (ours(lambda num: ComputationAware(512, batches=True), batch=1024), torch.float32, ("bike",)),
    "CaGP-Opt L-BFGS": (ours(lambda num: ComputationAware(min(512, num)), lbfgs=True), torch.float64, ("parkinsons",)),
}


def one(trainer, dtype, split, options, name):
    """The best (rate, epoch) by validation: table cells; or why there is none."""
    (x, y), valid, test = [tuple(part.to(dtype) for part in pair) for pair in split]
    best, failure = None, ""
    for rate in options.rates:
        pyro.set_rng_seed(0)
        path = bench.place(options, name, *[options.rows] * (options.rows < 10**9), float(rate), float(options.seconds))
        try:
            epoch, optimiser, predict, noise = trainer(x, y, rate)
            parameters = [p for group in optimiser.param_groups for p in group["params"]]
            # Evaluations cost, too: they come ever more rarely. A point of the curve: epoch, seconds, NLL, RMSE.
            run = {"epoch": 0, "spent": 0.0, "evaluate": 1.0, "best": None, "curve": []} | bench.kept(path)
            if "optimiser" in run:
                optimiser.load_state_dict(run["optimiser"])
                torch.set_rng_state(run["random"])
                for p, value in zip(parameters, run["values"]):
                    p.data.copy_(value)
            while run["spent"] < options.seconds:
                start = bench.clock(options.device)
                epoch()
                run["spent"], run["epoch"] = run["spent"] + bench.clock(options.device) - start, run["epoch"] + 1
                spent = run["spent"]
                if isinstance(optimiser, torch.optim.Adam):  # the rate falls linearly to a tenth
                    optimiser.param_groups[0]["lr"] = rate * max(0.1, 1 - 0.9 * spent / options.seconds)
                if spent >= min(run["evaluate"], options.seconds):
                    run["evaluate"] = spent + min(max(0.15 * spent, 1.0), 60.0)
                    validated = -bench.scores(*predict(valid[0]), valid[1])[0]
                    density, rmse, inside = bench.scores(*predict(test[0]), test[1])
                    run["curve"].append((run["epoch"], spent, -density, rmse))
                    bench.tell(run["curve"][-1])
                    if math.isfinite(validated) and (run["best"] is None or validated < run["best"][0]):
                        scores = f"{-density:.3f}", f"{rmse:.4f}", f"{abs(0.95 - inside):.3f}"
                        cells = f"{rate:g}", run["epoch"], *scores, f"{noise():.4f}", f"{spent:.0f}"
                        run["best"] = validated, cells
                    how = {"optimiser": optimiser.state_dict(), "random": torch.get_rng_state()}
                    bench.keep(path, run | how | {"values": [p.detach() for p in parameters]})
            best = min(filter(None, (best, run["best"])), default=None)
        except (ValueError, RuntimeError) as error:
            failure = str(error).splitlines()[0][:80]
            print(f"rate {rate}: {failure}", flush=True)
    return best[1] if best else ("", "", f"failed: {failure}", "", "", "", "")


def main():
    options = bench.parsed(
        __doc__,
        data=Path,
        sets=["parkinsons", "bike", "protein", "keggundirected"],
        methods=list(METHODS),
        rates=[0.1, 0.03],
        seconds=120.0,
        rows=10**9,  # at most
        device="cpu",
        keep=None,
        out=None,
    )
    page = bench.Page(options.out)
    page.say(
        f"{bench.machine(options.device)}, GPyTorch {gpytorch.__version__}; {options.seconds:g} s of training for each "
        f"method and rate of {options.rates}",
        "",
    )
    page.head(
        *("set (rows)", "method", "rate", "epoch", "NLL", "RMSE", "abs(0.95 − coverage)", "noise sd", "seconds"),
        "paper: NLL, RMSE, time",
    )
    for name in options.sets:
        split = load(options, name)
        for method in options.methods:
            trainer, dtype, only = METHODS[method]
            if not only or name in only:
                cells = one(trainer, dtype, split, options, f"{name}, {method}")
                theirs = PAPER.get((name, method))
                paper = f"{theirs[0]:.3f}, {theirs[1]:.3f}, {theirs[2]}" if theirs else ""
                page.row(f"{name} ({len(split[0][0])})", method, *cells, paper)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="gpytorch|linear_operator")
    main()
