"""Published programs under four families: latents' means and widths beside references, bounds, CPU seconds.

The programs are functions ``() -> (model, args, inducing points by GP site, reference)`` in a Python file, with a
dictionary PROGRAMS of them; a reference is (mean or None, sd) by latent. Makes programs.md.
"""

import itertools
import math
import runpy
import statistics

import pyro
import torch
from bench import HERE, Page, clock, parsed, seeded
from pyro.infer import NUTS
from pyro.infer.autoguide.initialization import init_to_median
from pyro.ops.stats import effective_sample_size

from pyro_sparsegp import AutoSparseGP, TraceQuadrature_ELBO, Whitening, diagnostics, families, fit

KINDS = families.SVGP, families.SGPR, families.OrthogonalInducing, families.CoupledPrecision
WARM, WORTH, SECONDS = 200, 100, 300  # of NUTS
STEPS, DRAWS = 300, 2000  # of 400 draws the sd of a skewed latent is known to 10 %
# Where a file has none. Hyperparameters: 14,000 weighted draws, of a Student t for θ and Laplace's q(g | θ), f being
# integrated out, worth 8,700; each mean is known to 0.01 sd. HMC agrees, and has the sds of f and g.
REFERENCES = {
    "noisy_mean": {
        **{"lf": (0.517, 0.131), "sf": (0.922, 0.395), "lg": (1.012, 0.459), "sg": (0.945, 0.443)},
        **{"c": (-1.307, 0.545), "f": (None, 0.101), "g": (None, 0.199)},
    }
}
HEAD = f"""# Published programs

Made by `python tests/benchmarks/programs.py --file FILE`. {STEPS} steps of README's loop (Adam at 0.02) or
of `fit`, one seed, float64, one thread. By latent: the distance of means in the reference's sd, where it has
a mean, and the ratio of sds (NUTS or an exact grid). The bound is the mean of the last 50 steps, the
log evidence is by importance weights of {DRAWS:,} draws. The last column has the latents that `guide.check`
names; its lines are below. A latent beyond 0.3 sd, or 0.75 to 1.33 times, that it does not name is bold.
"""
BY_NUTS = f"""
## Pyro's NUTS

With `--nuts`: on the program itself, whitened, from medians. {WARM} transitions are warm-up. It stops where the
smallest effective size of latents, but for GP sites, is {WORTH}, or after {SECONDS} CPU seconds. The mass matrix is
diagonal: with a full one, of 63 numbers, 175 transitions of offset took 356 s.

"""


def family_of(kind, num):
    """A family with so many inducing points in all."""
    return kind(num - num // 2, num // 2) if kind is families.OrthogonalInducing else kind(num)


def evidence(model, guide, args):
    """By importance weights of draws."""
    stats = diagnostics.to_datatree(model, guide, *args, num_samples=DRAWS).sample_stats
    weights = torch.tensor((stats.lp - stats.log_q).values).reshape(-1)
    return float(weights.logsumexp(0)) - math.log(len(weights))


def trained(program, kind, way):
    """A row of the table, and what the guide's check tells."""
    model, args, sites, reference = program()
    reference = reference or REFERENCES[program.__name__]
    seeded()
    guide = AutoSparseGP(model, {name: family_of(kind, num) for name, num in sites.items()})
    begun = clock()
    if way == "fit":
        losses = fit(model, guide, args, steps=STEPS, progress=False).losses
    else:
        svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), TraceQuadrature_ELBO())
        losses = [svi.step(*args) for _ in range(STEPS)]
    seconds = clock() - begun
    told = guide.check(*args)
    found, named = [], [name for name in reference if any(f"'{name}'" in line for line in told)]
    with torch.no_grad():
        draws = [guide.draw(*args) for _ in range(DRAWS)]
    for name, (mean, sd) in reference.items():
        values = torch.stack([draw[name] for draw in draws])
        away = "" if mean is None else f" {abs(values.mean(0).item() - mean) / sd:.2f}"
        ratio = values.std(0).mean().item() / sd
        text = f"{name}{away} x{ratio:.2f}"
        is_off = float(away or 0) > 0.3 or not 0.75 <= round(ratio, 2) <= 1.33
        found.append(f"**{text}**" if is_off and name not in named else text)
    place = program.__name__, kind.__name__, way
    numbers = [f"{value:.1f}" for value in (-statistics.mean(losses[-50:]), evidence(model, guide, args), seconds)]
    return [*place, *numbers, ", ".join(found), ", ".join(named)], [f"* {', '.join(place)}: {line}" for line in told]


def nuts(program):
    """Pyro's NUTS on the program itself: CPU seconds, transitions, the smallest effective size of latents."""
    model, args, _, _ = program()
    seeded()
    whitened = pyro.poutine.reparam(model, config=Whitening())
    kernel, draws, size, begun = NUTS(whitened, init_strategy=init_to_median), [], 0.0, clock()
    kernel.setup(WARM, *args)
    at = kernel.initial_params
    while size < WORTH and clock() - begun < SECONDS:
        at = kernel.sample(at)
        draws.append(torch.cat([value.reshape(-1) for name, value in at.items() if not name.endswith("_whitened")]))
        if (num := len(draws) - WARM) >= WORTH and num % 20 == 0:
            size = effective_sample_size(torch.stack(draws[WARM:])[None]).min().item()
    return program.__name__, f"{clock() - begun:.0f}", len(draws), f"{size:.0f}"


def main():
    options = parsed(__doc__, file=str, only=[""], nuts=False)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    published, is_whole, made, below = runpy.run_path(options.file)["PROGRAMS"], options.only == [""], Page(), []
    programs = [published[name] for name in (published if is_whole else options.only)]
    parts = (HERE / "programs.md").read_text().split(BY_NUTS)
    if options.nuts:
        made.head("program", "CPU s", "transitions", "effective size")
        for program in programs:
            made.row(*nuts(program))
    else:
        made.say(HEAD)
        made.head("program", "family", "way", "bound", "evidence", "CPU s", "latents", "told of")
        for program, kind, way in itertools.product(programs, KINDS, ("loop", "fit")):
            cells, told = trained(program, kind, way)
            made.row(*cells)
            below += told
        made.say("", *below)
    parts[options.nuts] = "\n".join(made.lines) + "\n"
    if is_whole:
        (HERE / "programs.md").write_text(BY_NUTS.join(parts))


if __name__ == "__main__":
    main()
