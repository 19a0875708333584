"""Convolutional Gaussian processes on MNIST against a plain RBF one, and a deep one on a subset.

python tests/benchmarks/images.py --data DIR/mnist.npz [--size 100] [--steps 400] [--seconds 20] [--only NAME]
    [--device cuda] [--stride 2] [--out FILE.json]

All have ten outputs of one process, the robust-max likelihood (ε = 0.001), zero means, Adam at rate 0.03 on random
batches of 64 in float32, and M inducing inputs by k-means: images under the RBF kernel, patches of 5 x 5 under the
others. Hyperparameters and patch weights are learned with the rest. Each is scored on test images twice:
after ``--steps`` steps and after ``--seconds`` seconds of training, those of the process on a CPU (other jobs do not
lengthen these), of the clock on a GPU. Rows that --out has are not run again.

As in paper 1, appendix G.2: deep layers start from k-means of patches, the upper ones of images under random Glorot
convolutions, locations are random, the location kernel is Matern-3/2 with length 3. Not as there: MNIST for CIFAR-10;
M, stride and the number of steps are a CPU's; all are whitened.
"""

from functools import partial
from pathlib import Path

import bench
import numpy as np
import pyro
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, bases, kernels
from pyro_sparsegp.distributions import RobustMax
from pyro_sparsegp.families import SVGP, OrthogonalInducing

SHAPE, PATCH, UPPER, CHANNELS, CLASSES = (28, 28), (5, 5), (4, 4), 4, 10


def positive(name, value, like):
    """A positive parameter."""
    return bench.positive(name, like.new_full((), value))


class Single:
    """One layer.

    :param kind: "rbf", "convolutional" or "tick".
    """

    def __init__(self, kind, stride):
        self.kind, self.stride = kind, stride
        grid = kernels.patch_grid(SHAPE, PATCH, stride)
        self.num_patches = grid[0] * grid[1]

    def kernel(self, x):
        """The kernel of images x."""
        variance = positive("variance", 5.0 if self.kind == "rbf" else 50.0, x)
        length = positive("length", 5.0 if self.kind == "rbf" else 2.0, x)
        if self.kind == "rbf":
            return variance * kernels.RBF(length)
        # Relative to their mean, so that a step of the optimiser is small beside them.
        weights = pyro.param("weights", x.new_ones(self.num_patches)) / self.num_patches
        patch = variance * kernels.RBF(length)
        if self.kind == "convolutional":
            return kernels.Convolutional(patch, SHAPE, PATCH, weights, self.stride)
        location = kernels.Matern32(positive("location", 3.0, x))
        return kernels.TICK(patch, location, SHAPE, PATCH, weights, self.stride)

    def __call__(self, x, y=None, size=None):
        """The model."""
        f = pyro.sample("f", GaussianProcess(self.kernel(x), x).expand([CLASSES]).to_event(1))
        with pyro.plate("data", size or len(x), subsample=x):
            return pyro.sample("y", RobustMax(f.mT), obs=y)

    def families(self, x, sizes):
        """Inducing inputs."""
        total = sum(sizes)
        if self.kind == "rbf":
            z = bases.k_means(None, x[torch.randperm(len(x), device=x.device)[: 100 * total]], total)
        else:
            z = bases.inducing_patches(x, total, SHAPE, PATCH, self.stride, locations=self.kind == "tick")
        return family(z, sizes)


class Deep:
    """Two layers: a process of all patches with four outputs, the next image's channels, under TICK."""

    def __init__(self, stride):
        self.stride = stride
        self.image = (CHANNELS, *kernels.patch_grid(SHAPE, PATCH, stride))

    def __call__(self, x, y=None, size=None):
        """The model."""
        rows = kernels.patches(x, SHAPE, PATCH, self.stride).flatten(-3, -2)
        inner = positive("inner variance", 5.0, x) * kernels.RBF(positive("inner length", 2.0, x))
        g = pyro.sample("g", GaussianProcess(inner, rows).expand([CHANNELS]).to_event(1))
        outer = positive("variance", 50.0, x) * kernels.RBF(positive("length", 5.0, x))
        location = kernels.Matern32(positive("location", 3.0, x))
        grid = kernels.patch_grid(self.image, UPPER, 2)
        weights = pyro.param("weights", x.new_ones(grid[0] * grid[1])) / (grid[0] * grid[1])
        kernel = kernels.TICK(outer, location, self.image, UPPER, weights, 2)
        f = pyro.sample("f", GaussianProcess(kernel, bases.as_images(g, len(x))).expand([CLASSES]).to_event(1))
        with pyro.plate("data", size or len(x), subsample=x):
            return pyro.sample("y", RobustMax(f.mT), obs=y)

    def families(self, x, sizes):
        """Inducing patches of both layers."""
        h = bases.random_convolution(x[:1000], SHAPE, PATCH, CHANNELS, self.stride)
        z = bases.inducing_patches(x, sum(sizes), SHAPE, PATCH, self.stride)
        upper = bases.inducing_patches(h, sum(sizes), self.image, UPPER, 2, locations=True)
        return {"g": family(z, sizes), "f": family(upper, sizes)}


def family(z, sizes):
    """SVGP, or OrthogonalInducing for two sets."""
    return SVGP(z) if len(sizes) == 1 else OrthogonalInducing(*z.split(sizes))


@torch.no_grad()
def scores(guide, x, y):
    """Accuracy and mean log predictive probability; inner layers are five draws, the last is integrated."""
    assert guide.structure is not None
    draws = 5 if guide.structure.inner else 1
    found = []
    for rows in x.split(500):
        total = 0.0
        for _ in range(draws):
            guide(rows)
            q = guide.get_traces()[1].nodes["f"]["fn"].base_dist
            total = total + RobustMax(q.mean.mT).expected_probs(q.variance.mT) / draws
        found.append(total)
    probs = torch.cat(found)
    hits = (probs.argmax(-1) == y).double().mean().item()
    return hits, probs.gather(-1, y[:, None]).log().mean().item()


def run(model, sizes, independent, data, options):
    """Train, and score twice."""
    x, y, new, truth = data
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = AutoSparseGP(model, model.families(x, sizes), independent_draws=("g",) if independent else ())
    guide(x[:200], y[:200])
    training, found = bench.Training(model, guide, x, y, 0.03, 64, nodes=20), {}
    training.step()  # not counted: it looks at the model
    while len(found) < 2:
        training.until(steps=training.steps + 1)
        for name, reached in (
            ("steps", training.steps >= options.steps),
            ("seconds", training.seconds >= options.seconds),
        ):
            if reached and name not in found:
                found[name] = (training.steps, training.seconds, *scores(guide, new, truth))
    return found


def rows_of(options):
    """Name, model, sizes, whether draws are independent, and how many images to train on."""
    m = options.size
    for kind in ("rbf", "convolutional", "tick"):
        for sizes in ([m], [m, m]):
            name = f"{kind}, {'SVGP' if len(sizes) == 1 else 'OrthogonalInducing'} {' + '.join(map(str, sizes))}"
            yield name, Single(kind, options.stride), sizes, False, 60_000
    few = options.subset
    yield f"tick, SVGP {m}, {few} images", Single("tick", options.stride), [m], False, few
    yield f"two layers, SVGP {m} each, {few} images", Deep(options.stride), [m], False, few
    yield f"two layers, the same, independent draws, {few} images", Deep(options.stride), [m], True, few


def main():
    options = bench.parsed(
        __doc__,
        data=Path,
        device="cpu",
        size=100,
        steps=400,
        seconds=20.0,
        stride=2,
        subset=10_000,
        test=2_000,  # the first so many test images
        only="",  # rows whose name has this
        out=bench.HERE / "images.json",
    )
    pyro.enable_validation(False)
    with np.load(options.data) as z:
        x, new = (torch.from_numpy(z[k]).flatten(1).float().to(options.device) / 255 for k in ("Xtrain", "Xtest"))
        y, truth = (torch.from_numpy(z[k]).long().to(options.device) for k in ("ytrain", "ytest"))
    order = bench.shuffled(len(x)).to(options.device)
    x, y, new, truth = x[order], y[order], new[: options.test], truth[: options.test]
    done = bench.Kept(options.out)
    for name, model, sizes, independent, num in rows_of(options):
        if options.only in name:
            done.run(name, partial(run, model, sizes, independent, (x[:num], y[:num], new, truth), options))
    page = bench.Page()
    page.say(f"{bench.machine(options.device)}; stride {options.stride}; {len(new)} test images", "")
    page.head(
        *("model", "ms a step", f"accuracy, LL after {options.steps} steps", f"steps in {options.seconds:.0f} s"),
        f"accuracy, LL after {options.seconds:.0f} s",
    )
    for name, found in done.items():
        (a, t, *first), (b, _, *second) = found["steps"], found["seconds"]
        shown = [f"{100 * hits:.1f} %, {ll:.3f}" for hits, ll in (first, second)]
        page.row(name, f"{1000 * t / a:.0f}", shown[0], b, shown[1])


if __name__ == "__main__":
    main()
