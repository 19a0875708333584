# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Scale
#
# *Rows that do not fit into memory, a job that is cut off, a second process: what changes in the program?*
#
# Nothing changes in the model, and one line in the training. Two million rows are in files. `fit` reads what a step
# needs, from a memory map or from any iterable of batches. It writes checkpoints and resumes from them bit for bit,
# and it shares its steps between processes. This notebook does each of these once, and asserts that the results
# agree.
#
# On the command line: `python tutorials/scale.py [--device cuda] [--rows 2000000] [--steps 300] [--out DIR] [--short]`.

# %% tags=["hide-input"]
import os
import resource
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import command_line  # options of the tutorials, in this folder
import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, diagnostics, fit, kernels
from pyro_sparsegp.families import SVGP

options = command_line.options(
    "Two million rows on disk, checkpoints, two processes.",
    rows=(2_000_000, "rows on disk", 4_000),
    steps=(300, "training steps of each fit", 6),
    inducing=(64, "inducing points", 16),
)
device = options.device
folder = Path(tempfile.mkdtemp())


def peak():
    """Peak resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


# %% [markdown]
# ## Rows on disk
#
# Each row is a count and sixteen inputs, in float32. Rows are written in blocks of 100,000, so no array ever holds
# all of them.

# %%
COLUMNS, BLOCK = 16, 100_000


def truth(x):
    return np.sin(6 * x[:, 0]) + x[:, 1] * x[:, 2] - 0.5 * x[:, 3]


def simulated(generator, num):
    x = generator.random((num, COLUMNS), dtype=np.float32)
    return x, generator.poisson(np.exp(truth(x))).astype(np.float32)


generator = np.random.default_rng(0)
with open(folder / "x", "wb") as xs, open(folder / "y", "wb") as ys:
    for start in range(0, options.rows, BLOCK):
        for file, part in zip(
            (xs, ys), simulated(generator, min(BLOCK, options.rows - start))
        ):
            part.tofile(file)
x_new, y_new = (
    torch.from_numpy(part).to(device) for part in simulated(generator, 2_000)
)
megabytes = sum((folder / name).stat().st_size for name in "xy") / 2**20
print(f"{options.rows:,} rows, {megabytes:.0f} MiB on disk")

# %% [markdown]
# ## The program
#
# `size` is the number of all rows. The plate weighs the rows of a batch so that they count for all. `fit` passes
# `size` itself.


# %%
def model(x, y=None, size=None):
    scale = pyro.sample("scale", dist.LogNormal(x.new_tensor(0.0), 1.0))
    length = pyro.sample(
        "length", dist.LogNormal(x.new_zeros(COLUMNS), 1.0).to_event(1)
    )
    f = pyro.sample("f", GaussianProcess(scale * kernels.Matern52(length), x, mean=0.5))
    with pyro.plate("data", size or len(x), subsample=x):
        return pyro.sample("y", dist.Poisson(f.exp()), obs=y)


def new(family=None):
    """A fresh guide; the same start each time."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    return AutoSparseGP(model, family or SVGP(options.inducing), point_estimates=True)


settings = {"steps": options.steps, "device": device, "progress": False}


def judged(guide):
    """Mean log predictive density of new rows, and the share of them that their 90 % intervals hold."""
    scores = diagnostics.predictive_scores(
        model, guide, x_new, y_new, num_samples=2, probs=(0.9,), seed=0
    )
    return float(scores.summary.loc["log_score", "mean"]), scores.coverage(0.9)


# %% [markdown]
# ## From a memory map, and from an iterable
#
# `fit` treats a memory map like an array, and draws batches of its rows anew in each epoch. If rows come in an order
# of their own (from many files, a database, a network), pass an iterable of batches or a `DataLoader`. Here the
# iterable reads one block after another and shuffles the rows of each. `fit` holds no more than a batch of an
# iterable.
#
# We measure by how much the memory of the process grows. A fit to 20,000 rows in memory comes first, so that the
# memory of the library itself is not counted. The growth under a memory map means little: the operating system counts
# the pages that this process has read, although it gives their memory to others when needed.

# %%
maps = (
    np.memmap(folder / "x", np.float32, "r", shape=(options.rows, COLUMNS)),
    np.memmap(folder / "y", np.float32, "r", shape=(options.rows,)),
)


class Blocks:
    """Batches of 512 out of blocks of the files."""

    def __init__(self, batch_size=512):
        self.batch_size = batch_size

    def __iter__(self):
        generator = np.random.default_rng(1)
        while True:
            with open(folder / "x", "rb") as xs, open(folder / "y", "rb") as ys:
                for start in range(0, options.rows, BLOCK):
                    num = min(BLOCK, options.rows - start)
                    x = np.fromfile(xs, np.float32, num * COLUMNS).reshape(num, COLUMNS)
                    y = np.fromfile(ys, np.float32, num)
                    for rows in generator.permutation(num)[
                        : num - num % self.batch_size
                    ].reshape(-1, self.batch_size):
                        yield torch.from_numpy(x[rows]), torch.from_numpy(y[rows])


fit(
    model,
    new(),
    tuple(
        torch.from_numpy(part)
        for part in simulated(generator, min(options.rows, 20_000))
    ),
    batch_size=512,
    **settings,
)
results, scores, growth = {}, {}, {}
for name, data, how in (
    ("iterable", Blocks(), {"size": options.rows}),
    ("memory map", maps, {"batch_size": 512}),
):
    guide, before = new(), peak()
    results[name] = fit(model, guide, data, **how, **settings)
    growth[name] = peak() - before
    scores[name] = judged(guide)
    print(
        f"{name:10} {results[name].steps} steps in {results[name].seconds:.0f} s, bound a row "
        f"{-results[name].losses[-20:].mean() / options.rows:.3f}; new rows: log density {scores[name][0]:.3f}, "
        f"{scores[name][1]:.0%} within 90 % intervals; memory grew by {growth[name]:.0f} MiB"
    )
rate = torch.from_numpy(np.exp(truth(x_new.cpu().numpy())))
best = dist.Poisson(rate).log_prob(y_new.cpu()).mean().item()
print(f"the truth's own log density {best:.3f}")

# %% [markdown]
# ## Cut off, and resumed
#
# `fit` writes the file `checkpoint=` every minute and at the end, and never leaves half a file. It holds the
# parameters, the optimiser, the random generators and the position in the data. Here a stopping rule ends a fit in
# the middle, as Ctrl-C would. The same call with `resume=True`, here or in a new process, goes on from there.

# %%
whole = new()
steps = options.steps // 3 * 2
short = settings | {"steps": steps, "batch_size": 512}
uncut = fit(model, whole, maps, **short)
file = folder / "fit.pt"


def cut_off(losses):
    return len(losses) == steps // 2


first = fit(model, new(), maps, checkpoint=file, stopping=cut_off, **short)
resumed = new()
second = fit(model, resumed, maps, checkpoint=file, resume=True, **short)
print(
    f"{first.steps} steps, then to {second.steps}; the checkpoint has {file.stat().st_size / 2**10:.0f} KiB"
)
same = np.array_equal(uncut.losses, second.losses) and all(
    torch.equal(a, b)
    for a, b in zip(whole.state_dict().values(), resumed.state_dict().values())
    if torch.is_tensor(a)
)
print(f"the same, bit for bit, as without the cut: {same}")

# %% [markdown]
# ## Two processes
#
# This is a script for `torchrun`. Each process passes its own rows, and `fit(..., group=...)` adds up gradients and
# natural steps over processes. All processes end with the posterior that one process gets from the joined batches. To
# see this, we also run the script as one process with the joined batches. On GPUs the backend is `"nccl"`.

# %%
script = folder / "worker.py"
script.write_text(
    textwrap.dedent(
        """
        import os, sys
        import numpy as np, pyro, pyro.distributions as dist, torch
        import torch.distributed as distributed
        from pyro_sparsegp import AutoSparseGP, GaussianProcess, fit, kernels
        from pyro_sparsegp.families import SVGP

        folder, rows, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
        torch.set_num_threads(1)
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if world > 1:
            distributed.init_process_group("gloo")

        def model(x, y=None, size=None):
            f = pyro.sample("f", GaussianProcess(kernels.Matern52(1.0), x, mean=0.5))
            with pyro.plate("data", size or len(x), subsample=x):
                return pyro.sample("y", dist.Poisson(f.exp()), obs=y)

        class Share:  # rows rank, rank + world, ... of each batch of 512
            def __iter__(self):
                x = np.memmap(folder + "/x", np.float32, "r", shape=(rows, 16))
                y = np.memmap(folder + "/y", np.float32, "r", shape=(rows,))
                for start in range(0, 512 * steps, 512):
                    part = slice(start + rank, start + 512, world)
                    yield torch.tensor(x[part]).double(), torch.tensor(y[part]).double()

        pyro.set_rng_seed(0)
        z = torch.rand(32, 16, dtype=torch.float64)
        guide = AutoSparseGP(model, SVGP(z, start="prior"))
        group = distributed.group.WORLD if world > 1 else None
        result = fit(model, guide, Share(), size=rows, steps=steps, group=group, progress=False)
        mean = guide.posterior(z)["f"].mean.detach()
        torch.save((result.losses, mean), f"{folder}/result_{world}_{rank}.pt")
        """
    )
)
arguments = [
    str(script),
    str(folder),
    str(options.rows),
    str(min(options.steps // 5, options.rows // 512)),
]
environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
torchrun = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
]
for command in ([sys.executable, *arguments], [*torchrun, *arguments]):
    subprocess.run(
        command, check=True, env=environment, capture_output=True, timeout=240
    )
alone, first_of_two, second_of_two = (
    torch.load(folder / f"result_{name}.pt", weights_only=False)
    for name in ("1_0", "2_0", "2_1")
)
apart = max(
    (found[1] - alone[1]).abs().max().item() for found in (first_of_two, second_of_two)
)
print(
    f"{len(alone[0])} steps; two processes and one are {apart:.1e} apart in f, {alone[1].std():.2f} its spread"
)

# %% [markdown]
# ## On a GPU
#
# `--device cuda` runs everything above on a GPU, except for the two processes. `fit` moves each batch to the GPU when
# it reads it, and the guide makes its parameters there. A step copies nothing from the host ([GPUs, float32 and
# several processes](../docs/how-to/gpu.md)).

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 3.6))
for name, result in results.items():
    axes[0].plot(-result.losses / options.rows, lw=0.8, label=name)
axes[0].set(title="bound, nats a row", xlabel="step", ylim=(-3, -1))
axes[0].legend()
axes[1].plot(-uncut.losses / options.rows, lw=3, alpha=0.4, label="uncut")
axes[1].plot(-first.losses / options.rows, lw=1, label="cut off")
axes[1].plot(
    np.arange(first.steps, second.steps),
    -second.losses[first.steps :] / options.rows,
    lw=1,
    label="resumed",
)
axes[1].set(title="cut off and resumed", xlabel="step", ylim=(-3, -1))
axes[1].legend()
figure.tight_layout()
figure.savefig(options.out / "scale.png", dpi=80)
print(f"The picture is in {options.out}")

# %% [markdown]
# ## The claims, as assertions

# %%
if options.full:
    assert growth["iterable"] < 0.3 * megabytes  # rows on disk stay there,
    for score, coverage in scores.values():
        assert best - 0.05 < score  # both ways find the function,
        assert coverage > 0.85
    assert device != "cpu" or same  # a resumed fit is the same fit,
    assert apart < 1e-8  # and so is a fit by two processes.

# %% [markdown]
# ## What to try next
#
# * Ten million rows in less than 1 GiB, and times of steps: [figures](../docs/explanation/benchmarks.md).
# * A loop of your own, schedules, stopping: [training](../docs/how-to/training.md), [save and
#   resume](../docs/how-to/save-and-resume.md).
# * Whether to trust a fit: [diagnostics](diagnostics.ipynb).
