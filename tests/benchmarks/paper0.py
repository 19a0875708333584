"""Paper 0 (coupled posteriors of additive models): illustration, rank, costs, calibration.

python tests/benchmarks/paper0.py PART [--out tests/benchmarks/paper0.md] [--short]

PART is friedman, gap, cost or calibration; each writes its section of the table's file, and its picture beside it.
"""

import itertools
import math
import re
import statistics
import time
from functools import partial

import bench
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.optim import ClippedAdam

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import CoupledCovariance, CoupledPrecision, MeanFieldAdditive
from pyro_sparsegp.gaussians import BlockPlusLowRank, IdentityPlusLowRank


def record(options, part, title, text):
    """Replace the part's section of the file."""
    short = " --short" if options.short else ""
    made = f"Made by `python tests/benchmarks/paper0.py {part}{short}`, {bench.machine()}."
    section = f"## {title}\n\n{made}\n\n{text.strip()}\n"
    print(section, flush=True)
    old = options.out.read_text() if options.out.exists() else "# Paper 0 (coupled posteriors of additive models)\n"
    pattern = rf"## {re.escape(title)}\n.*?(?=\n## |\Z)"
    new = re.sub(pattern, lambda _: section, old, flags=re.S) if f"## {title}\n" in old else f"{old}\n{section}"
    options.out.write_text(new)


def minimised(loss, parameters, iterations):
    """The least loss that L-BFGS finds."""
    more = {"history_size": 50, "tolerance_grad": 1e-7, "tolerance_change": 1e-11}
    return bench.lbfgs(loss, parameters, iterations, 2 * iterations, **more)


# Section 7 of the paper.

LABELS = [f"x{i + 1}" for i in range(6)]


def friedman(x):
    return 10 * torch.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]


def _half(t):
    """∫ 10 sin(πts) ds over [0, 1]."""
    return 10 * (1 - torch.cos(math.pi * t)) / (math.pi * t)


def analytic(x):
    """The ANOVA effects of Friedman's function under uniform inputs."""
    grid = (torch.arange(20_000, dtype=x.dtype) + 0.5) / 20_000
    level = _half(grid).mean()
    main = [_half(x[:, i]) - level for i in range(2)]
    effects = [*main, 20 * (x[:, 2] - 0.5) ** 2 - 20 / 12, 10 * (x[:, 3] - 0.5), 5 * (x[:, 4] - 0.5), 0 * x[:, 5]]
    pair = 10 * torch.sin(math.pi * x[:, 0] * x[:, 1]) - main[0] - main[1] - level
    return dict(zip(LABELS, effects)) | {"x1:x2": pair}


def shares():
    """The analytic Sobol indices."""
    line = ((torch.arange(2000, dtype=torch.float64) + 0.5) / 2000)[:, None].expand(2000, 6)
    parts = {label: effect.square().mean().item() for label, effect in analytic(line).items()}
    axis = line[::10, 0]
    plane = torch.cartesian_prod(axis, axis)
    both = torch.cat([plane, torch.zeros(len(plane), 4) + 0.5], -1)
    parts["x1:x2"] = analytic(both)["x1:x2"].square().mean().item()
    return {label: part / sum(parts.values()) for label, part in parts.items()}


def anova(variances, lengths, base=kernels.RBF):
    """The paper's kernel: a constant, a main effect of each column, and a product of two further kernels."""
    parts = [base(lengths[i]) for i in range(8)]
    main = [(variances[i] * kernels.Anova(parts[i])[i]).named(LABELS[i]) for i in range(6)]
    pair = (variances[6] * kernels.Anova(parts[6])[0] * kernels.Anova(parts[7])[1]).named("x1:x2")
    return sum(main) + pair + kernels.Constant(100.0).named("constant")


def fixed_inputs():
    """16 regular points a main effect, a 4 x 4 grid for the interaction."""
    line, side = torch.linspace(0, 1, 16)[:, None], torch.linspace(0, 1, 4)
    return [*[line] * 6, torch.cartesian_prod(side, side), None]


def illustration(x, y=None):
    variances, lengths = bench.positive("variances", 5 * x.new_ones(7)), bench.positive("lengths", 0.5 * x.new_ones(8))
    f = pyro.sample("f", GaussianProcess(anova(variances, lengths), x))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, bench.positive("noise", x.new_tensor(2.0))), obs=y)


def run_friedman(options):
    num, steps = (500, 40) if options.short else (5000, 1000)
    pyro.set_rng_seed(0)
    x = torch.rand(num, 6)
    y = friedman(x) + torch.randn(num)
    z = fixed_inputs()
    grid = torch.rand(2000, 6)
    truth = analytic(grid)
    families = {
        "CoupledPrecision, rank 16": CoupledPrecision(z, rank=16, trainable=False),
        'rank 16, base="identity"': CoupledPrecision(z, rank=16, base="identity", trainable=False),
        "MeanFieldAdditive": MeanFieldAdditive(z, trainable=False),
        "CoupledCovariance": CoupledCovariance(z, trainable=False),
    }
    rows, indices = [], {}
    for label, family in families.items():
        bench.seeded(1)
        start = time.perf_counter()
        guide = AutoSparseGP(illustration, family)
        svi = SVI(illustration, guide, ClippedAdam({"lr": 0.05, "lrd": 0.01 ** (1 / steps)}), TraceQuadrature_ELBO(2))
        for _ in range(steps):
            svi.step(x, y)
        loss = svi.evaluate_loss(x, y)
        seconds = time.perf_counter() - start
        with torch.no_grad():
            q = guide.posterior(grid)["f"]
            errors = [(q.components[name].mean - effect).square().mean().sqrt() for name, effect in truth.items()]
            noise = pyro.param("noise").item() ** 2
            indices[label] = q.components.sobol_indices(400)
        rows.append([label, f"{-loss:.1f}", *(f"{error:.3f}" for error in errors), f"{noise:.3f}", f"{seconds:.0f}"])
        if label.startswith("CoupledPrecision"):
            picture(guide, x, y, options.out.with_name("paper0_friedman.png"))
    text = (
        f"Friedman's function of six columns (x6 inert), N = {num}, noise variance 1, the paper's kernel and Z. RMSE "
        f"of each effect's mean to the analytic ANOVA effect, at 2,000 uniform inputs. "
        f"{steps} steps of each family's default, natural ones for q, on all rows; Adam's for hyperparameters, at 0.05 "
        f"falling to a hundredth.\n\n"
        + bench.table(["family", "bound", *truth, "noise variance", "seconds"], rows)
        + "\n\nSobol indices in per cent, mean and 95 % interval of draws:\n\n"
        + bench.table(
            ["effect", "analytic", *indices],
            [
                [name, f"{100 * share:.2f}", *(_interval(100 * draws[name]) for draws in indices.values())]
                for name, share in shares().items()
            ],
        )
        + "\n\n![effects](paper0_friedman.png)"
    )
    record(options, "friedman", "Section 7: Friedman's function", text)


def _interval(draws):
    low, high = draws.quantile(torch.tensor([0.025, 0.975]).to(draws)).tolist()
    return f"{draws.mean():.2f} [{low:.2f}, {high:.2f}]"


@torch.no_grad()
def picture(guide, x, y, path):
    line = torch.full((200, 6), 0.5) + (torch.linspace(1e-3, 1, 200)[:, None] - 0.5)
    parts, truth = guide.posterior(line)["f"].components, analytic(line)
    figure, axes = bench.pyplot().subplots(2, 4, figsize=(14, 6), layout="constrained")
    for axis, name in zip(axes.flat, LABELS):
        column = LABELS.index(name)
        mean, spread = parts[name].mean, 1.96 * parts[name].stddev
        axis.plot(x[::10, column], (y - y.mean())[::10], ".", color="0.6", ms=2)
        axis.fill_between(line[:, column], mean - spread, mean + spread, alpha=0.4, lw=0)
        axis.plot(line[:, column], mean)
        axis.plot(line[:, column], truth[name], "r--", lw=1)
        axis.set(title=name, ylim=(-12, 12))
    side = torch.linspace(1e-3, 1, 40)
    plane = torch.cat([torch.cartesian_prod(side, side), torch.full((1600, 4), 0.5)], -1)
    both = guide.posterior(plane)["f"].components["x1:x2"].mean, analytic(plane)["x1:x2"]
    for axis, value, title in zip(axes.flat[6:], both, ("x1:x2, posterior mean", "x1:x2, analytic")):
        shown = axis.contourf(side, side, value.reshape(40, 40).T, levels=torch.linspace(-6, 6, 25))
        axis.set(title=title, xlabel="x1", ylabel="x2")
        figure.colorbar(shown, ax=axis)
    figure.savefig(path, dpi=70)


# What rank a user needs.


def gap(q, gram_factor, log_det):
    """KL from the optimum N(m, P⁻¹), P = I + ΦᵀΦ/σ², of q with the optimum's mean: ½(tr PS − M − log|PS|).

    It is what the bound of a Gaussian likelihood loses by the family; Φᵀ Φ/σ² = CᵀC comes as C.
    """
    size = sum(part.square().sum() for part in gram_factor)
    return q.kl() + 0.5 * (q.variance_change(gram_factor).sum() + size) - 0.5 * log_det


def gaps(phi, ranks, iterations):
    """The gaps at noise variance 1, the low-rank ones by L-BFGS; that of one full covariance is 0."""
    sizes = [part.shape[-1] for part in phi]
    joined = torch.cat(phi, -1)
    gram = joined.mT @ joined
    precision = gram + torch.eye(len(gram))
    log_det = torch.linalg.slogdet(precision)[1]
    jitter = 1e-12 * gram.trace() / len(gram)
    factor = list(torch.linalg.cholesky(gram + jitter * torch.eye(len(gram))).mT.split(sizes, -1))
    own = [rows.split(sizes, -1)[i] for i, rows in enumerate(precision.split(sizes))]
    found = {"mean field": 0.5 * (sum(torch.linalg.slogdet(part)[1] for part in own) - log_det).item()}
    # P = I + Φ̃ᵀΦ̃ + NΦ̄Φ̄ᵀ for centred features Φ̃ and their means: what terms share first of all is their level.
    levels = [math.sqrt(len(part)) * part.mean(0) for part in phi]
    centred = [part - level[:, None] * level for part, level in zip(own, levels)]
    starts = {"block": own, "block, from levels": centred, "block, as it starts": None, "identity": None}
    scale = joined.square().sum(-1).mean().rsqrt()
    for label, blocks in starts.items():
        found[label] = []
        for rank in ranks:
            torch.manual_seed(0)
            kind = IdentityPlusLowRank if label == "identity" else BlockPlusLowRank
            module = kind(sizes, (), joined.new_zeros(()), rank=rank)
            if blocks is None:  # from the prior, and the leading directions of ΦᵀΦ
                module.start(None, [scale * part for part in phi])
            for i, part in enumerate(blocks or ()):
                tril = torch.linalg.cholesky(torch.linalg.inv(part))
                setattr(module, f"scale_tril_{i}", tril)
                if blocks is centred:
                    first = (tril.mT @ levels[i])[:, None]
                    setattr(module, f"b_{i}", torch.cat([first, 0.1 * getattr(module, f"b_{i}").detach()[:, 1:]], -1))
            parameters = [p for name, p in module.named_parameters() if "loc" not in name]
            found[label].append(minimised(lambda module=module: gap(module(), factor, log_det), parameters, iterations))
    return found


def plain(variances, lengths):
    """Main effects as plain squared exponentials and a constant: their levels are not told apart."""
    parts = (variances[i] * kernels.RBF(lengths[i])[i] for i in range(6))
    return sum(parts) + kernels.Constant(100.0)


def run_gap(options):
    num, iterations = (500, 30) if options.short else (5000, 400)
    ranks = [2, 16] if options.short else [1, 4, 16, 64, 113]
    kinds = {"Anova": (anova, fixed_inputs()), "plain": (plain, [*fixed_inputs()[:6], None])}
    figure, axes = bench.pyplot().subplots(1, 4, figsize=(15, 3.3), sharey=True, layout="constrained")
    rows = []
    for axis, ((name, (make, z)), length) in zip(axes, itertools.product(kinds.items(), (0.3, 0.8))):
        pyro.set_rng_seed(0)
        x = torch.rand(num, 6)
        kernel = make(torch.full((7,), 10.0), torch.full((8,), length))
        basis = CoupledCovariance(z).new_basis(GaussianProcess(kernel, x), "f")
        with torch.no_grad():
            phi = basis(kernel, None, "f")(x)
        found = gaps(phi, ranks, iterations)
        print(name, length, found, flush=True)
        for base in ("block", "block, from levels", "block, as it starts", "identity"):
            axis.plot(ranks, [max(value, 1e-3) for value in found[base]], "o-", label=base)
            rows.append([name, length, f"{found['mean field']:.2f}", base, *(f"{value:.2f}" for value in found[base])])
        axis.axhline(found["mean field"], color="k", ls="--", lw=1, label="mean field")
        axis.set(xscale="log", yscale="log", xlabel="rank", title=f"{name}, length scale {length}")
    axes[0].set_ylabel("nats below the full posterior's bound")
    axes[0].legend()
    figure.savefig(options.out.with_name("paper0_gap.png"), dpi=70)
    text = (
        "What the bound of a Gaussian likelihood loses against one full covariance (CoupledCovariance, gap 0), in "
        f"nats. N = {num} Friedman inputs, all hyperparameters fixed (variances 10, constant 100, noise variance 1). "
        "Anova is the paper's kernel and Z (113 coefficients in 8 blocks), plain six main effects of squared "
        "exponentials with 16 points each and a constant (97 in 7). Mean field in closed form, low ranks by L-BFGS, "
        f"{iterations} iterations: the block base from the mean field's optimum; from the coupling of the levels, "
        "I + Φ̃ᵀΦ̃ + NΦ̄Φ̄ᵀ with centred features and their means, which is of rank 1; and, as the family starts, from the "
        "prior and the leading directions of ΦᵀΦ. By natural steps, the family's default: natural.md.\n\n"
        + bench.table(["kernel", "length scale", "mean field", "base", *(f"rank {rank}" for rank in ranks)], rows)
        + "\n\n![gap by rank](paper0_gap.png)"
    )
    record(options, "gap", "Gap to the full posterior, by rank and base", text)


# Cost by the number of terms.


def run_cost(options):
    numbers, rounds, rows_a_step = ([4, 8], 1, 100) if options.short else ([4, 8, 16, 32, 64], 5, 1000)
    kinds = {
        "mean field": lambda z: MeanFieldAdditive(z, trainable=False),
        "coupled precision, rank 16": lambda z: CoupledPrecision(z, rank=16, trainable=False),
        "coupled covariance": lambda z: CoupledCovariance(z, trainable=False),
    }
    z = torch.linspace(0, 1, 16)[:, None]
    found = {name: [] for name in kinds}
    for terms in numbers:
        x = torch.rand(rows_a_step, terms)
        y = torch.randn(rows_a_step)

        def model(x, y=None):
            length = bench.positive("length", 0.3 * torch.ones(x.shape[-1]))
            kernel = sum(kernels.RBF(length[i])[i] for i in range(x.shape[-1]))
            f = pyro.sample("f", GaussianProcess(kernel, x))
            with pyro.plate("data", len(x)):
                return pyro.sample("y", dist.Normal(f, 0.5), obs=y)

        pyro.clear_param_store()
        guides = {name: AutoSparseGP(model, make(z)) for name, make in kinds.items()}
        steps = {name: bench.Training(model, guide, x, y, 1e-3).step for name, guide in guides.items()}
        steps |= {  # side by side
            f"KL of {name}": lambda guide=guide: guide.gps.f.coefficients().kl().backward()
            for name, guide in guides.items()
        }
        times = bench.interleaved(steps, rounds, warm=1)
        for name, guide in guides.items():
            # What the family stores: of a triangular factor, one half.
            stored = sum(
                (p.shape[-1] * (p.shape[-1] + 1) // 2 if "tril" in key else p.numel())
                for key, p in guide.gps.f.coefficients.named_parameters()
            )
            medians = (statistics.median(times[key]) for key in (name, f"KL of {name}"))
            found[name].append((stored, *medians))
            print(terms, name, found[name][-1], flush=True)
    rows = [[name, *(f"{a:,} / {b:.1f} / {c:.2f}" for a, b, c in entries)] for name, entries in found.items()]
    figure, axes = bench.pyplot().subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    for i, (axis, title) in enumerate(zip(axes, ("numbers stored", "step, ms of CPU time", "KL and its gradient, ms"))):
        for name, entries in found.items():
            axis.plot(numbers, [entry[i] for entry in entries], "o-", label=name)
        axis.set(xscale="log", yscale="log", xlabel="terms C", title=title)
    axes[0].legend()
    figure.savefig(options.out.with_name("paper0_cost.png"), dpi=80)
    text = (
        f"C one-dimensional RBF terms, 16 inducing inputs each, {rows_a_step} rows a step, float64: numbers stored / "
        f"milliseconds of CPU time a training step / of the KL and its gradient alone (medians of {rounds} rounds, "
        "side by side). Of a step, the kernels, their Cholesky factors and the features are the same for all three.\n\n"
        + bench.table(["family", *(f"C = {terms}" for terms in numbers)], rows)
        + "\n\n![cost](paper0_cost.png)"
    )
    record(options, "cost", "Cost by the number of terms", text)


# Calibration.


def correlated(num, columns, correlation, generator: torch.Generator):
    """Uniform columns with a Gaussian copula."""
    common = torch.randn(num, 1, generator=generator)
    own = torch.randn(num, columns, generator=generator)
    return torch.special.ndtr(correlation**0.5 * common + (1 - correlation) ** 0.5 * own)


def coverage(families, correlation, sets, num=200, iterations=80):
    """How often 95 % intervals of three effects, at the inputs, cover the function that the prior drew."""
    kernel = sum(2.0 * kernels.Anova(kernels.RBF(0.3))[i] for i in range(3)) + kernels.Constant(1.0)

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernel, x))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(f, 0.5), obs=y)

    hits = {name: [] for name in families}
    for seed in range(sets):
        pyro.set_rng_seed(seed)
        x = correlated(num, 3, correlation, torch.Generator().manual_seed(seed))
        effects = [GaussianProcess(term, x, jitter=1e-8).rsample() for term in kernel.terms]
        y = sum(effects) + 0.5 * torch.randn(num)
        for name, family in families.items():
            pyro.set_rng_seed(seed)
            guide = AutoSparseGP(model, bench.by_gradients(family))
            bound = TraceQuadrature_ELBO(2)(model, guide)
            bound(x, y)
            minimised(partial(bound, x, y), guide.parameters(), iterations)
            with torch.no_grad():
                parts = guide.posterior(x)["f"].components
            hits[name].extend(
                ((p.mean - f).abs() < 1.96 * p.stddev).double().mean() for p, f in zip(parts, effects[:3])
            )
    return {name: torch.stack(values).mean().item() for name, values in hits.items()}


def run_calibration(options):
    sets = 2 if options.short else 15
    z = [torch.linspace(0, 1, 16)[:, None]] * 3 + [None]
    families = {
        'CoupledPrecision, rank 16, base="block"': CoupledPrecision(z, rank=16, trainable=False),
        'CoupledPrecision, rank 32, base="identity"': CoupledPrecision(z, rank=32, base="identity", trainable=False),
        "MeanFieldAdditive": MeanFieldAdditive(z, trainable=False),
    }
    correlations = [0.0, 0.9]
    found = [coverage(families, correlation, sets) for correlation in correlations]
    rows = [[name, *(f"{100 * values[name]:.1f} %" for values in found)] for name in families]
    text = (
        f"Coverage of 95 % marginal intervals of three effects, at the inputs, over {sets} data sets of 200 rows: "
        "functions drawn from the prior (zero-mean RBF terms, length scale 0.3, variance 2), noise 0.5, "
        "hyperparameters known; uniform inputs with a Gaussian copula of the given correlation. 16 regular inducing "
        "inputs a term.\n\n" + bench.table(["family", *(f"correlation {c}" for c in correlations)], rows)
    )
    record(options, "calibration", "Calibration of the effects", text)


PARTS = {
    "friedman": run_friedman,
    "gap": run_gap,
    "cost": run_cost,
    "calibration": run_calibration,
}


def main():
    options = bench.parsed(__doc__, *PARTS, out=bench.HERE / "paper0.md", short=False)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    PARTS[options.part](options)


if __name__ == "__main__":
    main()
