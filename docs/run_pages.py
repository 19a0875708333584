"""Run the programs of pages in full, write what they print into the pages, and draw their pictures.

python docs/run_pages.py [stem ...]: how-to pages and family pages by name, all of them by default. What a block prints
goes into the ``text`` block that follows it, if there is one; the picture into a folder ``pictures`` beside the page,
if the page shows one.
"""

import contextlib
import io
import re
import sys
import warnings
from pathlib import Path

import matplotlib
import pyro
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from pyro_sparsegp import predict

HERE = Path(__file__).parent
FAMILIES = HERE / "explanation" / "families"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(\n```text\n.*?^```\n)?", re.M | re.S)
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9, "legend.frameon": False})


def line(low, high, num=200):
    return torch.linspace(low, high, num, dtype=torch.get_default_dtype())[:, None]


def band(axis, x, q, colour="C0", label=None):
    """Mean and two standard deviations."""
    mean, sd = q.mean.detach(), q.stddev.detach()
    axis.plot(x, mean, color=colour, lw=1.2, label=label)
    axis.fill_between(x.flatten(), mean - 2 * sd, mean + 2 * sd, color=colour, alpha=0.2, lw=0)


def points(axis, x, y, most=300):
    axis.plot(x[:most].flatten(), y[:most], ".", color="0.6", ms=3, zorder=0)


# ---- How-to pages: each function is given the page's names and a figure.


def likelihoods(page, figure):
    axis, grid = figure.subplots(), line(0, 1)
    points(axis, page["x"], page["y"])
    f, g = (page["guide"].posterior(grid)[name].mean.detach() for name in "fg")
    axis.plot(grid, f, label="f")
    axis.fill_between(grid[:, 0], f - 2 * g.exp(), f + 2 * g.exp(), alpha=0.2, lw=0, label="f ± 2 exp(g)")
    axis.legend()


def inducing_points(page, figure):
    axes, grid = figure.subplots(1, 3, sharey=True), line(0, 1)
    for axis, num in zip(axes, (5, 10, 20)):
        points(axis, page["x"], page["y"])
        band(axis, grid, page["guides"][num].posterior(grid)["f"])
        axis.set_title(f"{num} points")


def groups(page, figure):
    left, right = figure.subplots(1, 2, width_ratios=[1.4, 1])
    grid, new = line(0, 1, 100), page["S"]
    for s in (*range(new), new):
        q = page["guide"].posterior(torch.cat([grid, torch.full_like(grid, s)], 1))["f"]
        band(left, grid, q, "0.5" if s == new else f"C{s}", "a new station" if s == new else None)
    left.set(title="f at each station", xlabel="time")
    left.legend(fontsize=7)
    each = torch.stack([torch.zeros(new), torch.arange(new).double()], -1)
    effect = page["guide"].posterior(each)["f"].components["effect"]
    right.errorbar(effect.mean, range(new), xerr=2 * effect.stddev, fmt="o", ms=3, label="found, ± 2 sd")
    right.plot(page["effect"], range(new), "k|", ms=10, label="true")
    right.set(title="the stations' effects", yticks=range(new))
    right.legend(fontsize=7)


def spatial(page, figure):
    axes, grid = figure.subplots(1, 2, sharey=True), line(0, 1, 40)[:, 0]
    east, north = torch.meshgrid(grid, grid, indexing="xy")
    x = torch.stack([east.flatten(), north.flatten(), *2 * [torch.zeros(1600)]], 1)
    q = page["guide"].posterior(x)["f"].components["field"]
    truth = torch.sin(5 * x[:, 0]) * torch.cos(4 * x[:, 1])
    for axis, value, title in zip(axes, (q.mean, truth), ("the field", "the true field")):
        shown = axis.pcolormesh(grid, grid, value.detach().view(40, 40))
        figure.colorbar(shown, ax=axis)
        axis.plot(*page["place"].mT, "k.", ms=1)
        axis.set_title(title)


def additive(page, figure):
    axes = figure.subplots(1, 2)
    grid = line(0, 1, 100)
    rows = torch.cat([grid, torch.zeros(100, 2)], 1)
    band(axes[0], grid, page["guide"].posterior(rows)["f"].components["s(temp)"])
    axes[0].set(title="s(temp)", xlabel="temperature")
    days = torch.stack([torch.zeros(7), torch.zeros(7), torch.arange(7.0)], 1)
    q = page["guide"].posterior(days)["f"].components["weekday"]
    axes[1].errorbar(range(7), q.mean.detach(), 2 * q.stddev.detach(), fmt="o", ms=3)
    axes[1].set(title="weekday")


def predictions(page, figure):
    axis, new = figure.subplots(), page["x_new"]
    points(axis, page["x"], page["y"])
    band(axis, new, page["f"], label="f ± 2 sd")
    axis.plot(new, page["functions"](new).detach().mT, color="C1", lw=0.8)
    axis.legend()


def priors(page, figure):
    axis, grid = figure.subplots(), line(0.005, 1.5)[:, 0]
    axis.plot(grid, page["length_prior"].log_prob(grid).exp(), label="length scale")
    axis.plot(grid, page["sd_prior"].log_prob(grid).exp(), label="sd")
    axis.set(title="prior densities")
    axis.legend()


def latent_inputs(page, figure):
    axis = figure.subplots()
    for digit in range(4):
        axis.plot(*page["places"][page["label"] == digit].mT, ".", ms=3, label=str(digit))
    axis.set(title="places of the digits", aspect="equal")
    axis.legend()


def networks(page, figure):
    axis, grid = figure.subplots(), line(0, 1, 150)
    points(axis, page["x"], page["y"])
    draws = predict(page["model"], page["guide"], grid, num_samples=20)["f"]
    axis.plot(grid, draws.mT, color="C0", lw=0.5)


def several_outputs(page, figure):
    axis, grid = figure.subplots(), line(0, 1)
    shown = page["output"] == 2
    points(axis, page["X3"][shown, 0], page["y3"][shown])
    stacked = torch.cat([grid, torch.full_like(grid, 2.0)], 1)
    band(axis, grid, page["shared"].posterior(stacked)["f"], label="the third output")
    axis.legend()


def kernels_and_means(page, figure):
    axis, grid = figure.subplots(), line(0, 1)
    band(axis, grid, page["guide"].posterior(page["Derivative"].at(grid))["f"])
    axis.plot(page["x"], page["y"][: len(page["x"])], "ko", ms=3)
    for (x,), y, slope in zip(page["x"].tolist(), page["y"], page["y"][len(page["x"]) :]):
        axis.plot([x - 0.03, x + 0.03], [y - 0.03 * slope, y + 0.03 * slope], "k-")


def other_latents(page, figure):
    axis = figure.subplots()
    for i, (name, guide) in enumerate(page["guides"].items()):
        low, mid, high = guide.quantiles([0.05, 0.5, 0.95])["a"]
        where = torch.arange(5) + 0.2 * i
        axis.errorbar(where, mid, torch.stack([mid - low, high - mid]), fmt="o", ms=3, label=name)
    axis.plot(torch.arange(5) + 0.1, page["effect"], "k_", ms=14, label="true")
    axis.set(title="effects of the groups, 90 % intervals")
    axis.legend()


def survival(page, figure):
    left, right = figure.subplots(1, 2)
    age = line(-1.5, 1.5, 100)
    zeros = torch.zeros(100).long()
    band(left, age, page["guide"].posterior(age, zeros, zeros.bool(), zeros.double())["f"], label="f ± 2 sd")
    truth = torch.sin(2 * age)
    left.plot(age, truth - truth.mean(), "k--", lw=0.8, label="true, centred")
    left.set(title="log hazard", xlabel="age")
    left.legend(fontsize=7)
    draws, times = predict(page["model"], page["guide"], *page["data"], num_samples=300), line(0, 4, 60)[:, 0]
    for treated, label in enumerate(("untreated", "treated")):
        risk = draws["base"].flatten() + treated * draws["b"].flatten()
        alive = (-risk.exp()[:, None] * times ** draws["shape"].reshape(-1, 1)).exp()
        low, mid, high = alive.quantile(torch.tensor([0.05, 0.5, 0.95]).to(alive), 0)
        right.plot(times, mid, color=f"C{treated}", label=label)
        right.fill_between(times, low, high, color=f"C{treated}", alpha=0.2, lw=0)
    right.set(title="survival where f = 0, 90 % band", xlabel="time")
    right.legend(fontsize=7)


def areas(page, figure):
    axes = figure.subplots(1, 2)
    found = page["guide"].posterior(*page["data"])["f"].mean
    for axis, value, title in zip(axes, (found, page["effect"]), ("effects of areas, mean", "true effects")):
        shown = axis.imshow(value.view(page["side"], -1), vmin=-0.7, vmax=0.7)
        figure.colorbar(shown, ax=axis)
        axis.set(title=title, xticks=[], yticks=[])


def state_space(page, figure):
    axis, T = figure.subplots(), page["T"]
    t, base = line(0, T + 19, T + 20), page["guide"].median()["base"]
    axis.plot(page["t"], page["y"], ".", color="0.6", ms=3)
    draws = predict(page["model"], page["guide"], t, num_samples=500)
    low, mid, high = (
        (draws["base"].reshape(-1, 1) + draws["f"]).exp().quantile(torch.tensor([0.05, 0.5, 0.95]).to(t), 0)
    )
    axis.plot(t, mid, color="C0", lw=1.2, label="trend + AR(1), 90 % band")
    axis.fill_between(t[:, 0], low, high, color="C0", alpha=0.2, lw=0)
    axis.plot(t, (base + page["guide"].posterior(t)["f"].components["trend"].mean).exp(), color="C1", label="trend")
    axis.axvline(T, color="0.8", lw=0.8)
    axis.set(xlabel="week", title="mean count")
    axis.legend()


def row_effects(page, figure):
    left, right = figure.subplots(1, 2)
    grid = line(0, 1)
    draws = predict(page["model"], page["guide"], grid, num_samples=500)
    rate = draws["base"].reshape(-1, 1) + draws["f"]
    band(left, grid, torch.distributions.Normal(rate.mean(0), rate.std(0)), label="base + f, ± 2 sd")
    left.plot(grid, 1 + torch.sin(7 * grid), "k--", lw=0.8, label="true")
    left.legend(fontsize=7)
    low, mid, high = page["guide"].quantiles([0.05, 0.5, 0.95])["e"]
    order = mid.argsort()
    where = range(len(order))
    right.errorbar(where, mid[order], torch.stack([mid - low, high - mid])[:, order], fmt=".", ms=2, lw=0.6)
    right.set(title="effects of rows, sorted, 90 % intervals", xticks=[])


def preferences(page, figure):
    left, right = figure.subplots(1, 2)
    draws = page["draws"] - page["draws"].mean(1, keepdim=True)
    x, taste = page["x"], 2 * (page["taste"] - page["taste"].mean())
    band(left, x, torch.distributions.Normal(draws.mean(0), draws.std(0)), label="found, ± 2 sd")
    left.plot(x, taste, "k--", lw=0.8, label="true")
    left.set(title="f less its mean", xlabel="sugar")
    left.legend(fontsize=7)
    right.bar(x[:, 0], page["best"], 0.02)
    right.set(title="probability that an amount is the best", xlabel="sugar")


def dose_response(page, figure):
    left, right = figure.subplots(1, 2)
    grid = line(0, 1)
    draws = predict(page["model"], page["guide"], grid, torch.ones(len(grid)), num_samples=500)
    log_dose = draws["level"].reshape(-1, 1) + draws["f"]
    band(left, grid, torch.distributions.Normal(log_dose.mean(0), log_dose.std(0)), label="level + f, ± 2 sd")
    left.plot(grid, 0.8 * torch.sin(5 * grid), "k--", lw=0.8, label="true")
    left.set(title="log dose of half effect", xlabel="age")
    left.legend(fontsize=7)
    t = page["t"]
    band(right, t, page["guide_growth"].posterior(t)["r"], label="r, ± 2 sd")
    right.plot(t, page["rate"].log(), "k--", lw=0.8, label="true")
    right.set(title="log growth rate", xlabel="time")
    right.legend(fontsize=7)


# ---- Family pages: a panel for each guide of the page's program.


def effects(page, figure):
    """Terms of an additive kernel, under each guide."""
    axes, grid = figure.subplots(1, 2, sharey=True), line(0, 1)
    for axis, column in zip(axes, (0, 1)):
        x = torch.full((200, 2), 0.5).index_copy(1, torch.tensor([column]), grid)
        for colour, (name, guide) in zip(("C3", "C0"), page["guides"].items()):
            band(axis, grid, guide.posterior(x)["f"].components[column], colour, name)
        axis.set(title=f"effect of column {column}")
    axes[0].legend(fontsize=7)


def family(page, figure):
    """f ± 2 sd under each guide, with the inducing points of the first."""
    guides = page["guides"]
    if page["x"].shape[1] > 1:
        return effects(page, figure)
    low, high = page.get("span", (0, 1))
    axes, grid = figure.subplots(1, len(guides), sharey=True, squeeze=False)[0], line(low, high)
    for axis, (name, guide) in zip(axes, guides.items()):
        points(axis, page["x"], page["y"])
        band(axis, grid, guide.posterior(grid)["f"])
        axis.set_title(name)
    return None


def run(page):
    """The page's names, and its text with what its blocks print."""
    torch.set_default_dtype(torch.float32)
    pyro.clear_param_store()
    names = {"__name__": page.stem}

    def written(found):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(found[1], str(page), "exec"), names)
        shown = f"\n```text\n{printed.getvalue().rstrip()}\n```\n" if found[2] else ""
        return f"```python\n{found[1]}```\n{shown}"

    return names, BLOCK.sub(written, page.read_text())


def main():
    folders = HERE / "how-to", FAMILIES
    for page in [page for folder in folders for page in sorted(folder.glob("*.md"))]:
        if sys.argv[1:] and page.stem not in sys.argv[1:]:
            continue
        picture = page.parent / "pictures" / f"{page.stem}.png"
        names, text = run(page)
        page.write_text(text)
        if f"pictures/{page.stem}.png" in text:
            picture.parent.mkdir(exist_ok=True)
            figure = plt.figure(figsize=(7.5, 2.8), layout="constrained")
            with torch.no_grad():
                draw = (
                    family if "guides" in names and page.parent == FAMILIES else globals()[page.stem.replace("-", "_")]
                )
                draw(names, figure)
            figure.savefig(picture, dpi=100, metadata={"Software": None})
            plt.close(figure)
        print(page.stem)


if __name__ == "__main__":
    main()
