"""What `guide.check` tells of posteriors that are known to be right or wrong.

Each program has some guides, right ones and wrong by construction. The truth is by importance sampling: hyperparameters
from a wide normal around the mode of a dense nested Laplace approximation, all else from its Gaussian given these,
weighted by the exact joint density. A posterior is wrong if its median is off by over AWAY standard deviations (of a
normal whose interval is as long) or its interval's length is outside WIDTHS, right if it is within NEAR and ALIKE, and
else not counted. It is named if a line is about it. `--kept FILE` keeps what was trained, for another run.
"""

import time
import warnings
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from bench import parsed, seeded

from pyro_sparsegp import AutoSparseGP, GaussianProcess, families, fit, kernels
from pyro_sparsegp.guide.field import is_normal_prior, run_standardised
from pyro_sparsegp.guide.latents import Hyperparameters
from pyro_sparsegp.guide.moments import interval
from pyro_sparsegp.guide.nested import by_values
from pyro_sparsegp.guide.runs import Priors
from pyro_sparsegp.program.traces import all_sites

AWAY, WIDTHS = 0.35, (0.7, 1.43)
NEAR, ALIKE = 0.25, (0.8, 1.25)
DRAWS, EACH = 1200, 4  # and so many for a value of the hyperparameters
N = 30
SVGP, Exact = families.SVGP, families.Exact


def noise_of(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def drawn(kernel, x, seed):
    """A function of a prior."""
    return torch.linalg.cholesky(kernel(x) + 1e-8 * torch.eye(len(x))) @ noise_of(seed, len(x))


def rows(fn, y):
    with pyro.plate("data", len(y)):
        return pyro.sample("y", fn, obs=y)


def line():
    return torch.linspace(0, 1, N)[:, None]


def level():
    x = line()
    y = 5 + torch.sin(6 * x[:, 0]) + 0.3 * noise_of(0, N)

    def model(x, y):
        mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
        s = pyro.sample("s", dist.LogNormal(0.0, 0.7))
        noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.7))
        f = pyro.sample("f", GaussianProcess(s * kernels.RBF(0.3), x))
        rows(dist.Normal(mu + f, noise), y)

    return model, (x, y)


def plain():
    x = line()
    y = torch.sin(6 * x[:, 0]) + 0.3 * noise_of(1, N)

    def model(x, y):
        variance = pyro.sample("variance", dist.LogNormal(0.0, 1.0))
        length = pyro.sample("length", dist.LogNormal(-1.0, 1.0))
        noise = pyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        f = pyro.sample("f", GaussianProcess(variance * kernels.Matern32(length), x))
        rows(dist.Normal(f, noise), y)

    return model, (x, y)


def counts():
    x, group = line(), torch.arange(N) % 5
    effects = torch.tensor([-0.8, 0.3, 0.9, 0.0, -0.4])
    y = torch.poisson(
        (1 + effects[group] + 0.7 * torch.sin(6 * x[:, 0])).exp(), generator=torch.Generator().manual_seed(2)
    )

    def model(x, group, y):
        mu, tau = pyro.sample("mu", dist.Normal(0.0, 2.0)), pyro.sample("tau", dist.LogNormal(-0.5, 0.5))
        s = pyro.sample("s", dist.LogNormal(-1.0, 0.7))
        with pyro.plate("groups", 5):
            a = pyro.sample("a", dist.Normal(0.0, tau))
        f = pyro.sample("f", GaussianProcess(s * kernels.RBF(0.3), x))
        rows(dist.Poisson((mu + a[group] + f).exp()), y)

    return model, (x, group, y)


def classes():
    x = line()
    y = (torch.sin(7 * x[:, 0]) + 0.7 * noise_of(3, N) > 0).double()

    def model(x, y):
        s = pyro.sample("s", dist.LogNormal(0.5, 0.7))
        f = pyro.sample("f", GaussianProcess(s * kernels.RBF(0.3), x))
        rows(dist.Bernoulli(logits=f), y)

    return model, (x, y)


def terms():
    """An additive kernel on a sparse design."""
    x = torch.rand(N, 2, generator=torch.Generator().manual_seed(4))
    y = torch.sin(6 * x[:, 0]) + x[:, 1] + 0.2 * noise_of(4, N)

    def model(x, y):
        s = pyro.sample("s", dist.LogNormal(0.0, 0.7))
        kernel = s * kernels.RBF(0.4)[0] + kernels.RBF(0.4)[1] + kernels.Constant(4.0)
        f = pyro.sample("f", GaussianProcess(kernel, x))
        rows(dist.Normal(f, 0.2), y)

    return model, (x, y)


def two():
    """Two functions of a column each, whose levels data can't tell apart."""
    x = torch.rand(N, 2, generator=torch.Generator().manual_seed(5))
    y = torch.sin(6 * x[:, 0]) + x[:, 1] + 0.2 * noise_of(5, N)

    def model(x, y):
        s = pyro.sample("s", dist.LogNormal(0.0, 0.7))
        f = pyro.sample("f", GaussianProcess(s * kernels.RBF(0.5), x[:, :1]))
        g = pyro.sample("g", GaussianProcess(kernels.RBF(0.5), x[:, 1:]))
        rows(dist.Normal(f + g, 0.2), y)

    return model, (x, y)


def loading():
    x = torch.linspace(0, 1, 20)[:, None]
    f = drawn(kernels.Matern32(0.3), x, 6)
    data = f + 0.3 * noise_of(7, 20), 1.5 * f + 0.3 * noise_of(8, 20)

    def model(x, y, t):
        b, f = pyro.sample("b", dist.Normal(0.0, 2.0)), pyro.sample("f", GaussianProcess(kernels.Matern32(0.3), x))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, 0.3), obs=y)
            pyro.sample("t", dist.Normal(b * f, 0.3), obs=t)

    return model, (x, *data)


def preferences():
    x, generator = torch.linspace(0, 1, 20)[:, None], torch.Generator().manual_seed(9)
    i = torch.randint(20, (70,), generator=generator)
    j = (i + torch.randint(1, 20, (70,), generator=generator)) % 20
    worth = 2 * torch.sin(7 * x[:, 0])
    y = torch.bernoulli(torch.special.ndtr(worth[i] - worth[j]), generator=generator)

    def model(x, y):
        s = pyro.sample("s", dist.LogNormal(0.5, 0.7))
        f = pyro.sample("f", GaussianProcess(s * kernels.RBF(0.25), x))
        rows(dist.Bernoulli(torch.special.ndtr(f[..., i] - f[..., j]).clamp(1e-9, 1 - 1e-9)), y)

    return model, (x, y)


def dose():
    """Two outputs of a site, which meet."""
    x, amount = line(), torch.rand(N, generator=torch.Generator().manual_seed(10))
    y = torch.sin(6 * x[:, 0]) * amount + torch.cos(4 * x[:, 0]) + 0.1 * noise_of(11, N)

    def model(x, amount, y):
        s = pyro.sample("s", dist.LogNormal(0.0, 0.7))
        f = pyro.sample("f", GaussianProcess(s * kernels.Matern32(0.3), x).expand([2]).to_event(1))
        rows(dist.Normal(f[..., 0, :] * amount + f[..., 1, :], 0.1), y)

    return model, (x, amount, y)


def correlated():
    x = line()
    y = 2 + torch.sin(6 * x[:, 0]) + 0.1 * noise_of(12, N)
    noise = 0.01 * torch.eye(N) + 0.02 * kernels.Matern12(0.1)(x)

    def model(x, y):
        mu, f = pyro.sample("mu", dist.Normal(0.0, 3.0)), pyro.sample("f", GaussianProcess(kernels.Matern32(0.3), x))
        pyro.sample("y", dist.MultivariateNormal(f + mu, noise), obs=y)

    return model, (x, y)


def growth():
    x, t = line(), 0.5 + torch.rand(N, generator=torch.Generator().manual_seed(13))
    y = (0.5 + 0.6 * torch.sin(5 * x[:, 0])).exp() * t + 0.1 * noise_of(14, N)

    def model(x, t, y):
        b, s = pyro.sample("b", dist.Normal(0.0, 2.0)), pyro.sample("s", dist.LogNormal(-1.0, 0.7))
        f = pyro.sample("f", GaussianProcess(s * kernels.RBF(0.3), x))
        rows(dist.Normal((b + f).exp() * t, 0.1), y)

    return model, (x, t, y)


def noisy():
    x = line()
    y = torch.sin(4 * x[:, 0]) + torch.exp(-2 + 2 * x[:, 0]) * noise_of(15, N)

    def model(x, y):
        c = pyro.sample("c", dist.Normal(-1.0, 1.0))
        s = pyro.sample("s", dist.LogNormal(0.0, 0.7))
        f = pyro.sample("f", GaussianProcess(s * kernels.RBF(0.4), x))
        g = pyro.sample("g", GaussianProcess(0.5 * kernels.RBF(0.5), x, mean=c))
        rows(dist.Normal(f, g.exp()), y)

    return model, (x, y)


def fidelity():
    x = torch.cat([torch.linspace(0, 1, 16), torch.linspace(0, 1, 9)])[:, None]
    is_high = torch.arange(25) >= 16
    low = torch.sin(9 * x[:, 0])
    y = torch.where(is_high, 1.6 * low + x[:, 0], low) + 0.1 * noise_of(17, 25)

    def model(x, y):
        rho, s = pyro.sample("rho", dist.Normal(1.0, 1.0)), pyro.sample("s", dist.LogNormal(0.0, 0.7))
        f = pyro.sample("f", GaussianProcess(s * kernels.RBF(0.25), x))
        d = pyro.sample("d", GaussianProcess(kernels.RBF(0.6), x))
        rows(dist.Normal(torch.where(is_high, rho * f + d, f), 0.1), y)

    return model, (x, y)


def cells():
    """An effect of single rows."""
    x = line()
    rate = (1.5 + torch.sin(5 * x[:, 0]) + 0.4 * noise_of(18, N)).exp()
    y = torch.poisson(rate, generator=torch.Generator().manual_seed(18))

    def model(x, y):
        mu, tau = pyro.sample("mu", dist.Normal(0.0, 3.0)), pyro.sample("tau", dist.LogNormal(-1.0, 0.5))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x))
        with pyro.plate("data", len(x)):
            e = pyro.sample("e", dist.Normal(0.0, tau))
            pyro.sample("y", dist.Poisson((mu + f + e).exp()), obs=y)

    return model, (x, y)


def survival():
    x, generator = line(), torch.Generator().manual_seed(19)
    hazard = (-0.5 + torch.sin(5 * x[:, 0])).exp()
    time_of = -torch.rand(N, generator=generator).log() / hazard
    y, seen = time_of.clamp(max=2.0), time_of <= 2.0

    def model(x, y):
        b, s = pyro.sample("b", dist.Normal(0.0, 2.0)), pyro.sample("s", dist.LogNormal(-0.5, 0.7))
        eta = b + pyro.sample("f", GaussianProcess(s * kernels.RBF(0.4), x))
        with pyro.plate("data", len(x)):
            with pyro.poutine.mask(mask=seen):
                pyro.sample("y", dist.Exponential(eta.exp()), obs=y)
            with pyro.poutine.mask(mask=~seen):
                alive = (-eta.exp() * y).exp().clamp(1e-12, 1 - 1e-12)
                pyro.sample("alive", dist.Bernoulli(probs=alive), obs=torch.ones(len(x)))

    return model, (x, y)


def sums():
    """Data of sums over rows."""
    x = line()
    y = torch.cumsum((0.3 * torch.sin(5 * x[:, 0])).exp(), 0) + 0.3 * noise_of(20, N)

    def model(x, y):
        b, s = pyro.sample("b", dist.Normal(0.0, 1.0)), pyro.sample("s", dist.LogNormal(-1.0, 0.7))
        f = pyro.sample("f", GaussianProcess(s * kernels.RBF(0.4), x))
        rows(dist.Normal((b + f).exp().cumsum(-1), 0.3), y)

    return model, (x, y)


def robust():
    x = line()
    y = torch.sin(6 * x[:, 0]) + 0.1 * dist.StudentT(3.0).sample((N,)) * 0 + 0.15 * noise_of(21, N)

    def model(x, y):
        mu, noise = pyro.sample("mu", dist.Normal(0.0, 3.0)), pyro.sample("noise", dist.LogNormal(-1.5, 0.7))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
        rows(dist.StudentT(4.0, mu + f, noise), y)

    return model, (x, y)


GUIDES = {
    "SVGP": (SVGP(20), {}),
    "Exact": (Exact(), {}),
    "independent": (SVGP(20), {"independent": True}),
    "points": (SVGP(20), {"point_estimates": True}),
    "few points": (SVGP(3, trainable=False), {}),
    "untrained": (SVGP(20), {"start": None}),
    "SGPR": (families.SGPR(20), {}),
    "mean field": (families.MeanFieldAdditive(12), {}),
    "CoupledPrecision": (families.CoupledPrecision(12), {}),
    "gradients": (SVGP(20, natural=False), {}),
}
STEPS = {"untrained": 3, "independent": 400}
ALWAYS = ["SVGP", "independent", "points", "few points", "untrained"]
PROGRAMS = {
    level: [*ALWAYS, "Exact", "gradients"],
    plain: ["SVGP", "Exact", "SGPR", "points", "few points", "untrained", "independent"],
    counts: [*ALWAYS, "SGPR", "gradients"],
    classes: ["SVGP", "SGPR", "points", "few points"],
    terms: ["SVGP", "mean field", "CoupledPrecision"],
    two: ["SVGP", "independent", "gradients"],
    loading: ["SVGP", "independent"],
    preferences: ["SVGP", "independent"],
    dose: ["SVGP"],
    correlated: ["SVGP", "independent"],
    growth: ["SVGP", "independent"],
    noisy: ["SVGP", "independent", "few points"],
    fidelity: ["SVGP", "independent"],
    cells: ["SVGP", "independent"],
    survival: ["SVGP", "independent"],
    sums: ["SVGP"],
    robust: ["SVGP", "independent"],
}


def truth(model, args):
    """By name medians and intervals, and the effective size of the draws."""
    seeded()
    guide = AutoSparseGP(model, SVGP(4), independent=True, start=None)
    guide.prepare(*args)
    run = Priors(guide, at_medians=True).perform(args, {})
    sites = dict(all_sites(run.trace))
    priors = {name: sites[name]["infer"]["prior"] for name in guide.facts.latents}
    hyper = {name: prior for name, prior in priors.items() if not is_normal_prior(prior)}
    hyper = Hyperparameters(hyper, {name: sites[name]["value"] for name in priors}, guide.like)

    def program(handler, given):
        return run_standardised(guide, args, {}, handler, given)

    nested = by_values(guide, sites, priors.keys() - hyper.priors.keys(), hyper, program)
    with torch.enable_grad():
        starts = [nested.tried(theta) for theta in [guide.like.new_zeros(hyper.size), *hyper.draws(4)]]
        best = nested.mode(starts) if hyper.size else starts[0]
        covariance = nested.covariance(best) if hyper.size else best.theta.new_zeros(0, 0)
    root, generator = torch.linalg.cholesky(covariance), torch.Generator().manual_seed(0)
    weights, values = [], []
    for _ in range(DRAWS // EACH):
        eps = torch.randn(hyper.size, generator=generator)
        with torch.enable_grad():
            at = nested.tried(best.theta + 1.3 * root @ eps)
        for _ in range(0 if at is nested.none else EACH):
            z = torch.randn(len(at.x), generator=generator)
            x = at.x + torch.linalg.solve_triangular(at.precision.factor.root.mT, z[:, None], upper=True)[:, 0]
            there, handler = nested.run(at.theta, x)
            density = handler.log_prior + nested.of_data(there) + nested.densities(at.theta).total(x)
            weights.append(density + 0.5 * (eps @ eps + z @ z - x @ x) - at.precision.half_log_det)
            each = {**handler.values, **hyper.values(at.theta)}
            values.append({name: each[name].detach().reshape(-1) for name in [*priors, *guide.facts.gps]})
    weights = torch.stack(weights).detach().softmax(0)
    found = {name: quantiles(torch.stack([value[name] for value in values]), weights) for name in values[0]}
    return found, float(1 / weights.square().sum())


@torch.no_grad()
def moments(guide, args, num=400):
    """Those of draws."""
    draws, weights = [guide.draw(*args) for _ in range(num)], torch.full((num,), 1 / num)
    names = [*guide.facts.latents, *guide.facts.gps]
    return {name: quantiles(torch.stack([draw[name].reshape(-1) for draw in draws]), weights) for name in names}


def quantiles(values, weights):
    """As :func:`interval`, of each column of weighted draws."""
    values, order = values.sort(0)
    below = weights[order].cumsum(0) - 0.5 * weights[order]
    rows = [(below < share).sum(0).clamp(max=len(values) - 1) for share in (0.05, 0.5, 0.95)]
    return interval(values.gather(0, torch.stack(rows)))[:2]


def compared(own, right):
    """A root mean square of distances, and a mean ratio of widths."""
    return float(((own[0] - right[0]) / right[1]).square().mean().sqrt()), float((own[1] / right[1]).mean())


def main():
    options = parsed(__doc__, only=[""], lines=False, kept=None)
    kept = torch.load(options.kept, weights_only=False) if options.kept and Path(options.kept).exists() else {}
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    total = {"named": 0, "wrong": 0, "alarms": 0, "right": 0}
    for program, guides in PROGRAMS.items():
        if options.only != [""] and program.__name__ not in options.only:
            continue
        model, args = program()
        begun = time.process_time()
        key = program.__name__
        right, size = kept[key] if key in kept else kept.setdefault(key, truth(model, args))
        print(
            f"{program.__name__}: truth by draws of effective size {size:.0f}, {time.process_time() - begun:.0f} s",
            flush=True,
        )
        for which in guides:
            family, how = GUIDES[which]
            seeded()
            try:
                guide = AutoSparseGP(model, family, **how)
                key = program.__name__, which
                if key not in kept:
                    fit(model, guide, args, steps=STEPS.get(which, 200), progress=False)
                    kept[key] = guide.state_dict(), moments(guide, args)
                    if options.kept:
                        torch.save(kept, options.kept)
                else:
                    guide.load_state_dict(kept[key][0])
                    guide(*args)
                own = kept[key][1]
                begun = time.process_time()
                lines = guide.check(*args)
                seconds = time.process_time() - begun
            except Exception as error:
                print(f"  {which}: {type(error).__name__}: {str(error)[:200]}")
                continue
            told = []
            for name in right:
                if guide.is_point(name):  # as its user wants it
                    continue
                away, ratio = compared(own[name], right[name])
                is_named = any(f"'{name}'" in line.split(":")[0] for line in lines)
                is_wrong = away > AWAY or not WIDTHS[0] <= ratio <= WIDTHS[1]
                is_right = away < NEAR and ALIKE[0] <= ratio <= ALIKE[1]
                total["wrong"] += is_wrong
                total["named"] += is_wrong and is_named
                total["right"] += is_right
                total["alarms"] += is_right and is_named
                mark = {(True, False): " MISSED", (False, True): ""}.get((is_wrong, is_named), "")
                mark = " ALARM" if is_right and is_named else mark
                told.append(f"{name} {away:.2f} x{ratio:.2f}{mark}")
            print(f"  {which}, {seconds:.1f} s: {', '.join(told)}", flush=True)
            for text in lines if options.lines else ():
                print("    *", text)
    print("{named} of {wrong} wrong posteriors are named; {alarms} alarms on {right} right ones".format(**total))


if __name__ == "__main__":
    main()
