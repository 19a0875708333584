"""Partial-effect plots show what the components say."""

import matplotlib
import numpy as np
import pytest
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, diagnostics, kernels
from pyro_sparsegp.families import MeanFieldAdditive

from .models import gaussian, refused

matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")

SMOOTH = kernels.RBF(0.4)
KERNEL = (
    kernels.Constant(1.0)
    + SMOOTH[0].named("s(a)")
    + kernels.Categorical(3)[3].named("group")
    + (SMOOTH[0] * SMOOTH[1]).named("te(a, b)")
    + (kernels.Categorical(3)[3] * SMOOTH[2]).named("by group")
    + (SMOOTH[0] * SMOOTH[1] * SMOOTH[2]).named("all")
)


@pytest.fixture
def posterior():
    x = torch.rand(50, 4)
    x[:, 3] = torch.randint(0, 3, (50,)).double()
    module = MeanFieldAdditive(5).build(GaussianProcess(KERNEL, x), "f")
    for name, parameter in module.named_parameters():
        if "loc" in name:
            parameter.data.normal_()
    yield module(GaussianProcess(KERNEL, x), "f")
    plt.close("all")


def test_all_effects(posterior):
    figure = diagnostics.plot_effects(posterior, columns=["a", "b", "c", "g"])
    shown = [axis for axis in figure.axes if axis.get_title()]
    assert [axis.get_title() for axis in shown] == ["s(a)", "group", "te(a, b)", "by group"]
    assert [axis.get_xlabel() for axis in shown] == ["a", "g", "a", "c"]
    assert shown[2].get_ylabel() == "b"
    x = posterior.process.x
    curve, rug = shown[0].lines
    at = torch.zeros(200, 4)
    at[:, 0] = torch.linspace(x[:, 0].min(), x[:, 0].max(), 200)
    part = posterior.components["s(a)"].at(at)
    np.testing.assert_allclose(curve.get_xdata(), at[:, 0])
    np.testing.assert_allclose(curve.get_ydata(), part.mean.detach())
    band = shown[0].collections[0].get_paths()[0].vertices
    expected = part.mean + 1.959964 * part.stddev
    assert abs(band[:, 1].max() - expected.max().item()) < 1e-5
    np.testing.assert_array_equal(rug.get_xdata(), x[:, 0])
    levels = shown[1].lines[0]
    at = torch.zeros(3, 4)
    at[:, 3] = torch.arange(3.0)
    np.testing.assert_allclose(levels.get_ydata(), posterior.components["group"].at(at).mean.detach())
    assert [text.get_text() for text in shown[3].get_legend().get_texts()] == ["g = 0", "g = 1", "g = 2"]
    at = torch.zeros(200, 4)
    at[:, 2], at[:, 3] = torch.linspace(x[:, 2].min(), x[:, 2].max(), 200), 1.0
    np.testing.assert_allclose(shown[3].lines[1].get_ydata(), posterior.components["by group"].at(at).mean.detach())
    assert np.ptp(shown[2].collections[0].get_array()) > 0


def test_chosen_effects_on_another_scale(posterior):
    figure = diagnostics.plot_effects(posterior, ["group", "s(a)"], transform=torch.exp, prob=0.5)
    shown = [axis for axis in figure.axes if axis.get_title()]
    assert [axis.get_title() for axis in shown] == ["group", "s(a)"]
    assert (shown[1].lines[0].get_ydata() > 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": ["s(q)"]}, "no term 's\\(q\\)'"),
        ({"names": ["constant"]}, "one or two columns, not 'constant'"),
        ({"names": ["all"]}, "one or two columns, not 'all'"),
        ({"names": []}, "no term of site 'f' reads one or two columns"),
        ({"columns": ["a"]}, "names 1 columns, the inputs have 4"),
        ({"prob": 95}, "prob must be between 0 and 1"),
    ],
)
def test_errors(posterior, options, message):
    refused(message, diagnostics.plot_effects, posterior, **options)


def test_a_curve_for_each_of_several_outputs():
    x = torch.stack([torch.rand(20), torch.arange(20.0).double() % 2], -1)
    kernel = kernels.Coregionalisation(torch.tensor([[1.0], [0.5]]).double())[1] * SMOOTH[0]
    module = MeanFieldAdditive(4).build(GaussianProcess(kernel + kernels.Constant(1.0), x), "f")
    figure = diagnostics.plot_effects(module(GaussianProcess(kernel + kernels.Constant(1.0), x), "f"))
    (axis,) = figure.axes
    assert len(axis.lines) >= 2
    assert all(np.isfinite(line.get_ydata()).all() for line in axis.lines)
    plt.close("all")
    process = GaussianProcess(SMOOTH, x[:, :1]).expand([2])  # and of a batch one at a time
    refused(r"has outputs \(2,\)", diagnostics.plot_effects, MeanFieldAdditive(5).build(process, "f")(process, "f"))


def test_a_guide_of_one_column():
    x = torch.rand(20, 1)
    guide = AutoSparseGP(gaussian(SMOOTH + kernels.Constant(1.0)), MeanFieldAdditive(5))
    guide(x, x[:, 0])
    for given, kind in ((guide, "AutoSparseGP"), (guide.posterior(x), "dict")):
        refused(rf"one GP site, got {kind}: give guide.posterior\(x\)\['f'\]", diagnostics.plot_effects, given)
    figure = diagnostics.plot_effects(guide.posterior(x)["f"])
    assert [axis.get_title() for axis in figure.axes] == ["rbf"]
    plt.close(figure)
