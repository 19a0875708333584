"""Paper 0 (coupled posteriors of additive models): its section 7, and its costs.

python tests/benchmarks/paper0.py friedman|cost [--out tests/benchmarks/paper0.md] [--short]

It writes its section of the table's file; the other sections and the pictures are of 0656b30.
"""

import itertools
import math
import re
import statistics
import time

import bench
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.optim import ClippedAdam

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import CoupledCovariance, CoupledPrecision, MeanFieldAdditive


def record(options, title, text):
    """Replace the part's section of the file."""
    short = " --short" if options.short else ""
    made = f"Made by `python tests/benchmarks/paper0.py {options.part}{short}`, {bench.machine()}."
    section = f"## {title}\n\n{made}\n\n{text.strip()}\n"
    print(section, flush=True)
    old = options.out.read_text() if options.out.exists() else "# Paper 0 (coupled posteriors of additive models)\n"
    pattern = rf"## {re.escape(title)}\n.*?(?=\n## |\Z)"
    new = re.sub(pattern, lambda _: section, old, flags=re.S) if f"## {title}\n" in old else f"{old}\n{section}"
    options.out.write_text(new)


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
            indices[label] = q.components.sobol_indices(400, draws=True)
        rows.append([label, f"{-loss:.1f}", *(f"{error:.3f}" for error in errors), f"{noise:.3f}", f"{seconds:.0f}"])
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
    record(options, "Section 7: Friedman's function", text)


def _interval(draws):
    low, high = draws.quantile(torch.tensor([0.025, 0.975]).to(draws)).tolist()
    return f"{draws.mean():.2f} [{low:.2f}, {high:.2f}]"


# Cost by the number of terms.


def peak(step):
    """MiB that a step has allocated at most, beside what was there."""
    with torch.profiler.profile(profile_memory=True) as found:
        step()
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))) / 2**20


def additive(x, y=None):
    length = bench.positive("length", 0.3 * x.new_ones(x.shape[-1]))
    f = pyro.sample("f", GaussianProcess(sum(kernels.RBF(length[i])[i] for i in range(x.shape[-1])), x))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, 0.5), obs=y)


def run_cost(options):
    numbers, z = [4, 16] if options.short else [4, 16, 64, 128, 256], torch.linspace(0, 1, 16)[:, None]
    kinds = {
        "mean field": MeanFieldAdditive(z, trainable=False),
        "coupled precision, rank 16": CoupledPrecision(z, rank=16, trainable=False),
        "coupled covariance": CoupledCovariance(z, trainable=False),
    }
    found = {name: [] for name in kinds}
    for terms in numbers:
        bench.seeded()
        x, y = torch.rand(1000, terms), torch.randn(1000)
        runs = {
            name: bench.Training(additive, AutoSparseGP(additive, kind), x, y, 1e-3) for name, kind in kinds.items()
        }
        times = bench.interleaved({name: run.step for name, run in runs.items()}, 3)
        for name, run in runs.items():
            state = run.guide.gps.f.coefficients.state_dict().values()
            kept = sum(value.numel() * value.element_size() for value in state) / 2**20
            found[name].append((statistics.median(times[name]), kept, peak(run.step)))
            print(terms, name, found[name][-1], flush=True)
    grown = math.log(numbers[-1] / numbers[-2])
    rows = []
    for name, all_ in found.items():
        slopes = " / ".join(f"{math.log(b / a) / grown:.1f}" for a, b in zip(*all_[-2:]))
        rows.append([name, *(f"{a:,.0f} / {b:.2f} / {c:,.0f}" for a, b, c in all_), slopes])
    text = (
        "C one-dimensional RBF terms, 16 inducing inputs each, 1,000 rows a step, float64, natural steps: milliseconds "
        "of CPU time a training step (median of 3, side by side) / MiB that q keeps / MiB that a step has allocated at "
        "most beside it. Slopes are of the logarithms between the last two sizes.\n\n"
        + bench.table(["family", *(f"C = {terms}" for terms in numbers), "slopes"], rows)
    )
    record(options, "Cost by the number of terms", text)


PARTS = {"friedman": run_friedman, "cost": run_cost}


def main():
    options = bench.parsed(__doc__, *PARTS, out=bench.HERE / "paper0.md", short=False)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    PARTS[options.part](options)


if __name__ == "__main__":
    main()
