"""Convolutional kernels against dense matrices made by loops; families on them; deep models of images."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch.testing import assert_close

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, bases, kernels, predict
from pyro_sparsegp.distributions import RobustMax
from pyro_sparsegp.families import SVGP, CollapsedOrthogonal, ComputationAware, FreeFormFamily, OrthogonalInducing
from pyro_sparsegp.numerics import functions as blocks
from pyro_sparsegp.posterior.drawing import GroupedSite
from pyro_sparsegp.program.structure import Group

from .models import FAMILIES, observed, one_function, prepared, refused, restored, train, trained

SHAPE, PATCH = (2, 6, 5), (3, 2)


def loops(images, shape, patch, stride):
    """Patches by slicing, image by image."""
    channels, height, width = shape if len(shape) == 3 else (1, *shape)
    found = []
    for image in images:
        image = image.reshape(channels, height, width)
        found.append(
            torch.stack(
                [
                    image[:, r : r + patch[0], c : c + patch[1]].reshape(-1)
                    for r in range(0, height - patch[0] + 1, stride)
                    for c in range(0, width - patch[1] + 1, stride)
                ]
            )
        )
    return torch.stack(found)


def places(grid):
    return torch.tensor([[float(r), float(c)] for r in range(grid[0]) for c in range(grid[1])])


def images(num, seed=0, shape=SHAPE):
    size = torch.Size(shape).numel()
    return torch.rand(num, size, generator=torch.Generator().manual_seed(seed))


def make(kind, stride=1, weighted=True, base=None):
    """A kernel, and the response's kernel with its inputs as functions of images, by loops."""
    base = 1.3 * kernels.Matern52(0.8) if base is None else base
    grid = kernels.patch_grid(SHAPE, PATCH, stride)
    num = grid[0] * grid[1]
    weights = torch.linspace(-0.5, 1.0, num) if weighted else None
    w = torch.full((num,), 1 / num) if weights is None else weights
    if kind == "Convolutional":
        kernel = kernels.Convolutional(base, SHAPE, PATCH, weights, stride)
        return kernel, base, lambda x: loops(x, SHAPE, PATCH, stride), w
    location = kernels.RBF(1.5)
    kernel = kernels.TICK(base, location, SHAPE, PATCH, weights, stride)

    def response(a, b):
        return base(a[:, :-2], b[:, :-2]) * location(a[:, -2:], b[:, -2:])

    def inputs(x):
        patches = loops(x, SHAPE, PATCH, stride)
        return torch.cat([patches, places(grid).expand(len(x), -1, 2)], -1)

    return kernel, response, inputs, w


KINDS = pytest.mark.parametrize("kind", ["Convolutional", "TICK"])


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("shape", [SHAPE, (6, 5)])
def test_patches_are_slices(shape, stride):
    x = images(4, shape=shape)
    found = kernels.patches(x, shape, PATCH, stride)
    assert torch.equal(found, loops(x, shape, PATCH, stride))
    rows, columns = kernels.patch_grid(shape, PATCH, stride)
    assert found.shape[1] == rows * columns
    assert torch.equal(kernels.patches(x.expand(3, 4, -1), shape, PATCH, stride)[1], found)


@KINDS
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("weighted", [True, False])
def test_covariances_are_those_of_loops(kind, stride, weighted):
    kernel, response, inputs, w = make(kind, stride, weighted)
    x, z = images(4), images(3, 1)
    dense = torch.stack([torch.stack([w @ response(a, b) @ w for b in inputs(z)]) for a in inputs(x)])
    assert_close(kernel(x, z), dense)
    dense = torch.stack([torch.stack([w @ response(a, b) @ w for b in inputs(x)]) for a in inputs(x)])
    assert_close(kernel(x), dense)
    assert_close(kernel.diag(x), dense.diagonal())
    assert_close(kernel(x[:1]), dense[:1, :1])
    some = inputs(z)[:, 0]
    assert_close(kernel.from_source(x, some), torch.stack([w @ response(a, some) for a in inputs(x)]))
    assert_close(kernel.source_inputs(x), inputs(x))
    assert_close(kernel.source(some), response(some, some))
    scaled = 2.5 * kernel
    assert_close(scaled(x), 2.5 * dense)
    assert_close(scaled.from_source(x, some), 2.5 * kernel.from_source(x, some))
    wide = torch.cat([torch.rand(4, 1), x], -1)
    assert_close(kernel[1:61].from_source(wide, some), kernel.from_source(x, some))


def test_larger_squares_of_patches_are_halved():
    shape, patch = (10, 9), (2, 2)  # 72 patches: several blocks
    kernel = kernels.Convolutional(kernels.RBF(0.6), shape, patch, torch.randn(72))
    x = torch.rand(3, 90)
    p = loops(x, shape, patch, 1)
    dense = torch.stack([kernel.weights @ kernels.RBF(0.6)(a, a) @ kernel.weights for a in p])
    assert_close(kernel.diag(x), dense)


@KINDS
def test_noise_of_the_response_is_counted_once(kind):
    kernel, _, _, w = make(kind, base=kernels.RBF(0.8) + kernels.White(0.3))
    plain, _, _, _ = make(kind, base=kernels.RBF(0.8))
    x = images(4)
    noise = 0.3 * w.square().sum()
    assert_close(kernel.diag(x), plain.diag(x) + noise)
    assert_close(kernel(x), plain(x) + noise * torch.eye(4))
    assert_close(kernel(x, x), plain(x, x))


@KINDS
def test_batches_of_hyperparameters_and_inputs(kind):
    grid = kernels.patch_grid(SHAPE, PATCH, 2)
    lengths, weights = torch.tensor([[0.5], [0.9], [1.4]]), torch.randn(3, grid[0] * grid[1])
    x, z, some = images(4), images(2, 1), torch.rand(5, 12 + 2 * (kind == "TICK"))

    def kernel(length, weights, scale):
        if kind == "TICK":
            k = kernels.TICK(kernels.Matern32(length), kernels.RBF(2 * length), SHAPE, PATCH, weights, 2)
        else:
            k = kernels.Convolutional(kernels.Matern32(length), SHAPE, PATCH, weights, 2)
        return scale * k

    scales = torch.tensor([1.0, 2.0, 3.0])
    for l_, w_ in [(lengths, weights), (lengths, weights[0]), (lengths[0], weights)]:
        batch = kernel(l_, w_, scales)
        assert batch.batch_shape == (3,)
        for i in range(3):
            one = kernel(l_[i] if l_.dim() == 2 else l_, w_[i] if w_.dim() == 2 else w_, scales[i])
            assert_close(batch(x)[i], one(x))
            assert_close(batch(x, z)[i], one(x, z))
            assert_close(batch.diag(x)[i], one.diag(x))
            assert_close(batch.from_source(x, some)[i], one.from_source(x, some))
            assert_close(batch(x.expand(2, 3, 4, -1))[1, i], one(x))
    k = kernel(lengths[0], weights[0], scales[0])
    many = torch.stack([x, x.flip(0)])
    assert_close(k(many)[1], k(x.flip(0)))
    assert_close(k(many, z)[1], k(x.flip(0), z))
    assert_close(k.diag(many)[1], k.diag(x.flip(0)))
    assert_close(k.from_source(many, some)[1], k.from_source(x.flip(0), some))


@KINDS
def test_gradients(kind, monkeypatch):
    grid = kernels.patch_grid(SHAPE, PATCH, 2)
    x, z = images(3).requires_grad_(), images(2, 1).requires_grad_()
    some = torch.rand(2, 12 + 2 * (kind == "TICK")).requires_grad_()
    length, weights = torch.tensor(0.8).requires_grad_(), torch.randn(grid[0] * grid[1]).requires_grad_()

    def everything(x, z, some, length, weights):
        if kind == "TICK":
            k = kernels.TICK(kernels.RBF(length), kernels.RBF(3 * length), SHAPE, PATCH, weights, 2)
        else:
            k = kernels.Convolutional(kernels.RBF(length), SHAPE, PATCH, weights, 2)
        return k(x), k(x, z), k.diag(x), k.from_source(x, some)

    inputs = (x, z, some, length, weights)
    assert torch.autograd.gradcheck(everything, inputs, fast_mode=True)
    whole = everything(*inputs)
    loss = sum(part.square().sum() for part in whole)
    gradients = torch.autograd.grad(loss, inputs)
    # In pieces, dropped and made again.
    monkeypatch.setattr(blocks, "_PIECE", 50)
    monkeypatch.setattr(blocks, "_KEPT", 10)
    pieces = everything(*inputs)
    for one, other in zip(whole, pieces):
        assert_close(one, other)
    for one, other in zip(gradients, torch.autograd.grad(sum(part.square().sum() for part in pieces), inputs)):
        assert_close(one, other)


@pytest.mark.parametrize("bounded", [True, False])
def test_memory_is_bounded(monkeypatch, bounded):
    """What a step keeps does not grow with the pairs of patches."""
    if bounded:
        monkeypatch.setattr(blocks, "_PIECE", 2**14)
        monkeypatch.setattr(blocks, "_KEPT", 2**14)
    kept = []
    length = torch.tensor(0.8, requires_grad=True)
    kernel = kernels.Convolutional(kernels.RBF(length), (12, 12), (3, 3))  # 100 patches
    x = torch.rand(20, 144)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        value = kernel.diag(x).sum() + kernel.from_source(x, torch.rand(30, 9)).sum()
    pairs = 20 * 100 * (100 // 2 + 30)
    assert (sum(kept) < pairs / 10) == bounded
    value.backward()
    assert length.grad.isfinite()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((28,), (5, 5)), r"image_shape must be \(H, W\) or \(C, H, W\)"),
        (((28, 28), (5,)), r"patch_shape must be \(h, w\)"),
        (((28, 28), (5, 29)), r"patch_shape \(5, 29\) is larger than the images, \(28, 28\)"),
        (((28, 28), (5, 5), None, 0), "stride must be a whole number of at least 1, got"),
        (((28, 28), (5, 5), torch.ones(3)), r"weights must be None or a tensor \(..., 576\).*24 x 24 pa.*got \(3,\)"),
    ],
)
def test_bad_shapes(arguments, message):
    refused(message, lambda: kernels.Convolutional(kernels.RBF(), *arguments))


def test_bad_images_and_bases():
    kernel = kernels.Convolutional(kernels.RBF(), (4, 4), (2, 2))
    refused(r"images have 15 columns, image_shape \(4, 4\) makes 16", kernel.diag, torch.rand(2, 15))
    refused("variance correction", kernels.Convolutional, kernels.DeepBasis(torch.nn.Linear(4, 2)), (4, 4), (2, 2))
    tick = kernels.TICK(kernels.RBF(), kernels.RBF(), (4, 4), (2, 2))
    with pytest.raises(ValueError, match=r"patches are \(M, 6\), with row and column"):
        tick.from_source(torch.rand(2, 16), torch.rand(3, 4))


# Families.

SIDE = 6


def bars(num, seed=0, dtype=torch.float64, kinds=2):
    """Images of a horizontal bar, a vertical bar or a diagonal at a random place, and which of them it is."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(kinds, (num,), generator=generator)
    x = 0.1 * torch.rand(num, SIDE, SIDE, generator=generator, dtype=torch.float64)
    for n in range(num):
        r, c = torch.randint(SIDE - 2, (2,), generator=generator).tolist()
        for i in range(3):
            x[n, r + i * (y[n] != 0), c + i * (y[n] != 1)] += 1
    return x.flatten(1).to(dtype), y if kinds > 2 else y.to(dtype)


def one_layer(x, y=None, size=None, kernel=None):
    scale = pyro.sample("scale", dist.LogNormal(x.new_tensor(3.0), 1.0))
    length = pyro.sample("length", dist.LogNormal(x.new_zeros(()), 0.5))
    weights = pyro.param("weights", x.new_full((16,), 1 / 16))
    k = kernels.Convolutional(kernels.RBF(length), (SIDE, SIDE), (3, 3), weights)
    f = pyro.sample("f", GaussianProcess(scale * k, x))
    return observed(dist.Bernoulli(logits=f), y, x, size)


# One of each kind of basis and posterior; the others put the same bases under other posteriors.


OF_A_KIND = ["SVGP", "OrthogonalInducing3", "DecoupledColumns", "CoupledPrecision"]
OF_A_KIND += ["AdditiveSGPR", "SemiCollapsedOrthogonal", "ComputationAwareCG"]


@pytest.mark.quick("0 | 1 | 2 | 3 | 4 | 5")  # not ComputationAwareCG, the longest
@pytest.mark.filterwarnings("ignore:the bound changes by")
@pytest.mark.parametrize(("i", "name"), enumerate(OF_A_KIND))
def test_families(i, name):
    family, dtype = FAMILIES[name], (torch.float64, torch.float32)[i % 2]
    torch.set_default_dtype((torch.float32, torch.float64)[i % 2])
    # There are only hyperparameters to learn, or the whole posterior by gradients.
    steps = 16 if isinstance(family, FreeFormFamily) else 4
    x, y = bars(30 if steps == 4 else 40, dtype=dtype)
    guide = AutoSparseGP(one_layer, family, independent=True)
    losses = train(one_layer, guide, x, y, steps=steps, lr=0.1)
    assert torch.tensor(losses).isfinite().all()
    half = min(4, steps // 2)
    assert sum(losses[-half:]) < sum(losses[:half])
    assert all(p.dtype == dtype for p in guide.parameters())
    new, truth = bars(30, 1, dtype)
    q = guide.posterior(new)["f"]
    assert_close(q.covariance_matrix.diagonal(), q.variance, rtol=1e-3, atol=1e-3)
    if isinstance(family, ComputationAware):
        assert (q.mathematical_variance <= q.variance + 1e-6).all()
    if name != "DecoupledColumns":  # which learns slowly
        assert ((q.mean > 0) == truth).float().mean() > 0.6
    again = restored(guide, one_layer, family, independent=True)
    assert torch.equal(again.posterior(new)["f"].mean, q.mean)
    assert all(value.isfinite().all() for value in guide.parameters())


def test_inducing_inputs_may_be_patches_images_or_both():
    x, y = bars(20)
    patches = kernels.patches(x, (SIDE, SIDE), (3, 3))[:7, 3]
    for name, family in {
        "counts": OrthogonalInducing(6, 5),
        "kmeans": OrthogonalInducing(6, 5, init="kmeans"),
        "patches": OrthogonalInducing(patches, patches + 0.1),
        "images": OrthogonalInducing(x[:6], x[6:11]),
        "mixture": OrthogonalInducing(patches, x[:5]),
        "other mixture": OrthogonalInducing(x[:5], patches),
        "in one": SVGP(x[:5]),
    }.items():
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide = prepared(one_layer, family, x, y, independent=True)
        start = TraceQuadrature_ELBO(10).loss(one_layer, guide, x, y)
        assert train(one_layer, guide, x, y, steps=3, lr=0.1)[-1] < start
        widths = [z.shape[-1] for z in guide.gps.f.basis.inputs]
        wanted = {"images": [36, 36], "mixture": [9, 36], "other mixture": [36, 9], "in one": [36]}
        assert widths == wanted.get(name, [9, 9])
        again = restored(guide, one_layer, family, independent=True)
        assert torch.equal(again.posterior(x)["f"].mean, guide.posterior(x)["f"].mean)


def test_the_mixture_is_the_posterior_given_both(monkeypatch):
    """Φ of patches and images spans what u = (g(Z), f(O)) says of f, by dense algebra."""
    kernel = 20.0 * kernels.Convolutional(kernels.RBF(1.0), (SIDE, SIDE), (3, 3))
    x, y = bars(20)
    z, o = kernels.patches(x, (SIDE, SIDE), (3, 3))[:5, 4], x[5:9]

    model = one_function(kernel, lambda f: dist.Normal(f, 0.3))
    guide = prepared(model, CollapsedOrthogonal(z, o), x, y)
    phi = torch.cat(guide.posterior(x)["f"].features, -1)
    cross = torch.cat([kernel.from_source(x, z), kernel(x, o)], -1)
    corner = kernel.from_source(o, z)
    gram = torch.cat([torch.cat([kernel.source(z), corner.mT], -1), torch.cat([corner, kernel(o)], -1)])
    assert_close(phi @ phi.mT, cross @ torch.linalg.solve(gram, cross.mT), rtol=1e-4, atol=1e-5)


# Deep models.


def hidden(name, x, shape, patch, scale, channels, mean=None):
    """A layer: a GP over all patches of all images, and its values as images."""
    rows = kernels.patches(x, shape, patch).flatten(-3, -2)
    process = GaussianProcess(scale * kernels.RBF(1.5), rows, mean)
    return bases.as_images(pyro.sample(name, process.expand([channels]).to_event(1)), len(x))


def two_layers(x, y=None, size=None):
    scales = pyro.param("scales", x.new_tensor([2.0, 5.0]), constraint=dist.constraints.positive)
    h = hidden("g", x, (SIDE, SIDE), (3, 3), scales[0], 2)
    k = kernels.TICK(scales[1] * kernels.RBF(1.5), kernels.Matern32(3.0), (2, 4, 4), (2, 2))
    f = pyro.sample("f", GaussianProcess(k, h).expand([3]).to_event(1))
    return observed(RobustMax(f.mT), y, x, size)


def starts(x, below=16, above=24):
    """Inducing patches of both layers, by appendix G.2."""
    h = bases.random_convolution(x, (SIDE, SIDE), (3, 3), 2)
    z = bases.inducing_patches(x, below, (SIDE, SIDE), (3, 3))
    return {"g": SVGP(z), "f": SVGP(bases.inducing_patches(h, above, (2, 4, 4), (2, 2), locations=True))}


@pytest.mark.quick("joint per image")
@pytest.mark.parametrize(
    ("independent", "dtype"), [((), torch.float64), (("g",), torch.float32)], ids=["joint per image", "independent"]
)
def test_two_layers_train_from_scratch(independent, dtype):
    torch.set_default_dtype(torch.float32 if dtype == torch.float64 else torch.float64)
    x, y = bars(120, dtype=dtype, kinds=3)
    guide = prepared(two_layers, starts(x), x[:20], y[:20], independent_draws=independent)
    assert guide.structure.gps["g"].group == Group(16, "f")
    svi = SVI(two_layers, guide, pyro.optim.Adam({"lr": 0.05}), TraceQuadrature_ELBO())
    for _ in range(60 if independent or dtype == torch.float32 else 45):
        rows = torch.randperm(120)[:40]
        loss = svi.step(x[rows], y[rows], size=120)
    assert loss < 350
    new, truth = bars(60, 1, dtype, 3)
    draws = predict(two_layers, guide, new, num_samples=5, joint=False)
    assert draws["g"].shape == (5, 2, 60 * 16)
    assert draws["f"].shape == (5, 3, 60)
    assert (draws["f"].mean(0).argmax(0) == truth).double().mean() > 0.75
    q = guide.posterior(new)["f"]
    again = restored(guide, two_layers, starts(x), independent_draws=independent)
    assert again.structure.gps["g"].group == Group(16, "f")
    assert torch.equal(again.posterior(new)["f"].mean, q.mean)
    guide.eval()  # all values jointly
    assert guide(new[:5])["g"].shape == (2, 80)


@pytest.mark.quick("one an output")
@pytest.mark.parametrize("lengths", [torch.tensor(0.7), torch.tensor([[0.5], [1.5]])], ids=["shared", "one an output"])
def test_draws_of_groups_have_the_covariance_within_them(lengths):
    def model(x, y=None):
        kernel = torch.tensor([1.0, 2.0]) * kernels.RBF(lengths) if lengths.dim() else kernels.RBF(lengths)
        g = pyro.sample("g", GaussianProcess(kernel, x, lambda x: x[..., 0]).expand([2]).to_event(1))
        h = g.unflatten(-1, (-1, 3)).movedim(0, 1).flatten(1)  # of three inputs each, in both outputs
        f = pyro.sample("f", GaussianProcess(kernels.RBF(2.0), h))
        return observed(dist.Normal(f, 0.1), y)

    x, y = torch.rand(12, 1), torch.randn(4)
    guide = trained(model, {"g": OrthogonalInducing(3, 2), "f": SVGP(4)}, x, y, steps=5)
    assert guide.structure.gps["g"].group == Group(3, "f")
    q = guide.posterior(x)["g"]
    site = GroupedSite(q.process, q.basis, q.coefficients, "g")
    site.group = 3
    values = site.rsample(torch.Size((40_000,)))
    assert values.shape == (40_000, 2, 12)
    assert_close(values.mean(0), q.mean, atol=0.03, rtol=0)
    flat = values.flatten(1)
    wanted = torch.block_diag(*q.covariance_matrix)
    group = torch.arange(24) // 3
    wanted = torch.where(group[:, None] == group, wanted, 0.0)
    assert_close(flat.mT.cov(), wanted, atol=0.05, rtol=0)


def test_groups_must_stay():
    def model(x, y=None, per=4):
        g = pyro.sample("g", GaussianProcess(kernels.RBF(1.0), x))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(1.0), g.unflatten(-1, (-1, per))))
        return observed(dist.Normal(f, 0.1), y)

    x = torch.rand(24, 1)
    guide = prepared(model, SVGP(4), x, torch.randn(6))
    assert guide.structure.gps["g"].group == Group(4, "f")
    guide(torch.rand(40, 1), torch.randn(10))
    with pytest.raises(ValueError, match=r"'g' has 24 inputs and 'f' has 12; at the guide's first call 4 of 'g' went"):
        guide(x, torch.randn(12), per=2)


def test_names_of_independent_draws():
    x, y = bars(20, kinds=3)
    refused("collection of names", lambda: AutoSparseGP(two_layers, SVGP(4), independent_draws="g"))
    guide = AutoSparseGP(two_layers, SVGP(4), independent_draws=("h",))
    refused(r"independent_draws names \['h'\]; the GP sites are \['f', 'g'\]", guide, x, y)


# Where the layers start.


def test_as_images_keeps_patches_and_channels():
    x = images(3)
    rows = kernels.patches(x, SHAPE, PATCH).flatten(0, 1)
    values = torch.stack([rows[:, 0], rows.sum(-1)])  # two channels
    found = bases.as_images(values, 3)
    grid = kernels.patch_grid(SHAPE, PATCH)
    for n, p in enumerate(loops(x, SHAPE, PATCH, 1)):
        assert_close(found[n].reshape(2, *grid)[0], p[:, 0].reshape(grid))
        assert_close(found[n].reshape(2, *grid)[1], p.sum(-1).reshape(grid))
    assert torch.equal(bases.as_images(values.expand(5, -1, -1), 3)[4], found)
    refused(r"values \(..., C, N·P\) of 7 images, got shape \(2, 48\)", bases.as_images, values, 7)


def test_random_convolutions_are_glorot_uniform():
    x = images(50)
    found = bases.random_convolution(x, SHAPE, PATCH, 300)
    grid = kernels.patch_grid(SHAPE, PATCH)
    assert found.shape == (50, 300 * grid[0] * grid[1])
    rows = kernels.patches(x, SHAPE, PATCH).flatten(0, 1)
    values = found.reshape(50, 300, -1).mT.flatten(0, 1)  # (N·P, C')
    filters = torch.linalg.lstsq(rows, values).solution
    assert_close(rows @ filters, values)  # one linear map of all patches
    bound = (6 / (12 + 300 * 6)) ** 0.5
    assert filters.abs().max() < bound
    assert_close(filters.std(), torch.tensor(bound / 3**0.5), rtol=0.05, atol=0)


def test_inducing_patches_are_centres_of_distinct_patches():
    x = torch.zeros(30, 60)
    x[:, 7] = torch.linspace(1, 2, 30)  # most patches are empty
    found = bases.inducing_patches(x, 20, SHAPE, PATCH)
    assert found.shape == (20, 12)
    assert len(found.unique(dim=0)) == 20
    located = bases.inducing_patches(x, 20, SHAPE, PATCH, 2, locations=True)
    assert located.shape == (20, 14)
    assert (located[:, 12:].amax(0) < torch.tensor(kernels.patch_grid(SHAPE, PATCH, 2))).all()
    with pytest.raises(ValueError, match="cannot return 20 patches: the images have 1 distinct"):
        bases.inducing_patches(torch.zeros(30, 60), 20, SHAPE, PATCH)
